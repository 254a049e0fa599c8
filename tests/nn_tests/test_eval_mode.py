import pytest
from torch import nn

from mmqc.nn.eval_mode import evaluating


@pytest.mark.parametrize("root", [True, False])
def test_evaluating__every_module_gets_its_mode_back(root):
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.Sequential(nn.Dropout())).train(root)
    model[1].training = not root
    before = [m.training for m in model.modules()]
    with evaluating(model):
        assert not any(m.training for m in model.modules())
        model.append(nn.Dropout().eval())
    assert [m.training for m in model.modules()] == [*before, root]
    with pytest.raises(ZeroDivisionError), evaluating(model):
        1 / 0  # noqa: B018
    assert [m.training for m in model.modules()] == [*before, root]
