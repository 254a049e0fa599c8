import concurrent.futures
import contextlib
import copy
import pickle
import threading

import pytest
import torch
from tolerance import assert_close
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mmqc.nn.modality import ModalityContext, attached, detach


class Decoder(nn.Module):
    """Returns what its linears would see."""

    def __init__(self) -> None:
        super().__init__()
        self.context: ModalityContext | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor | None:
        return self.context.rows(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = Decoder()

    def forward(self, input_ids=None, inputs_embeds=None, mm_token_type_ids=None) -> torch.Tensor | None:
        x = torch.zeros(*input_ids.shape, 4) if inputs_embeds is None else inputs_embeds
        return self.decoder(x)


@pytest.fixture
def model() -> Model:
    model = Model()
    model.decoder.context = ModalityContext.attach(model, (7, 8))
    return model


IDS = torch.tensor([[1, 7, 7, 2], [8, 3, 3, 9]])
VISUAL = torch.tensor([[False, True, True, False], [True, False, False, False]])


def test_modality_context__mask_from_ids(model: Model) -> None:
    assert torch.equal(model(input_ids=IDS), VISUAL)
    assert torch.equal(model(IDS), VISUAL)


def test_modality_context__mask_from_token_types(model: Model) -> None:
    kinds = torch.tensor([[0, 1, 2, 0], [0, 0, 0, 1]])
    assert torch.equal(model(inputs_embeds=torch.zeros(2, 4, 4), mm_token_type_ids=kinds), kinds > 0)


def test_modality_context__decode_step_ignores_token_types_of_the_prompt(model: Model) -> None:
    mask = model(input_ids=torch.tensor([[5], [6]]), mm_token_type_ids=torch.ones(2, 9))
    assert not mask.any(), "text alone; one row has a mask all the same, because to look would wait for the device"


def test_modality_context__embeddings_alone_are_refused(model: Model) -> None:
    with pytest.raises(ValueError, match="text_only = True"):
        model(inputs_embeds=torch.zeros(2, 4, 4))
    with pytest.raises(ValueError, match="cannot tell visual tokens from text"):
        model(inputs_embeds=torch.zeros(2, 1, 4), mm_token_type_ids=torch.ones(2, 9))
    model.decoder.context.text_only = True
    assert model(inputs_embeds=torch.zeros(2, 4, 4)) is None


def test_modality_context__rows_that_do_not_fit_are_refused(model: Model) -> None:
    context = model.decoder.context
    context.begin(model, (), {"input_ids": IDS})
    assert torch.equal(context.rows(torch.zeros(8, 4)), VISUAL.reshape(-1))  # flattened tokens, as experts take them
    with pytest.raises(ValueError, match="does not fit the visual mask"):
        context.rows(torch.zeros(9, 4))


def test_modality_context__a_call_that_bypasses_the_model_is_refused(model: Model) -> None:
    model(input_ids=IDS)
    with pytest.raises(RuntimeError, match="outside a call of the model"):
        model.decoder(torch.zeros(2, 4, 4))


def test_modality_context__a_failed_call_leaves_no_mask(model: Model) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        model.decoder.register_forward_pre_hook(lambda m, args: (torch.zeros(3, 4, 4),)) and model(input_ids=IDS)
    with pytest.raises(RuntimeError, match="outside a call of the model"):
        model.decoder(torch.zeros(2, 4, 4))


def test_modality_context__compiled_with_its_errors(model: Model) -> None:
    torch._dynamo.reset()
    whole = torch.compile(lambda ids: model(input_ids=ids) & True, backend="eager", fullgraph=True)
    assert torch.equal(whole(IDS), VISUAL)
    model.compile(backend="eager")
    assert torch.equal(model(input_ids=IDS), VISUAL)
    with pytest.raises(ValueError, match="cannot tell visual tokens from text"):
        model(inputs_embeds=torch.zeros(2, 4, 4))


def test_modality_context__deepcopy_shares_one_new_context(model: Model) -> None:
    twin = copy.deepcopy(model)
    assert twin.decoder.context is attached(twin)
    assert twin.decoder.context is not model.decoder.context
    assert torch.equal(twin(input_ids=IDS), VISUAL)
    twin.decoder.context.text_only = True
    assert torch.equal(model(input_ids=IDS), VISUAL)


def test_modality_context__is_no_state(model: Model) -> None:
    assert not model.state_dict()
    assert [name for name, _ in model.named_modules()] == ["", "decoder"]


def test_modality_context__attach_twice_and_detach(model: Model) -> None:
    with pytest.raises(ValueError, match="already has a ModalityContext"):
        ModalityContext.attach(model, (7,))
    detach(model)
    assert attached(model) is None
    assert not model._forward_pre_hooks_with_kwargs
    ModalityContext.attach(model, (7,))


def test_context__threads_have_a_mask_each(model: Model) -> None:
    """Two calls at once: each linear reads the mask of its own call, whichever began or ended last."""
    inside, results = threading.Barrier(2, timeout=30), {}

    def wait(*call: object) -> None:
        inside.wait()

    model.decoder.register_forward_pre_hook(wait)
    model.decoder.register_forward_hook(wait)

    def call(name: str, ids: torch.Tensor) -> None:
        results[name] = model(input_ids=ids)

    other = torch.tensor([[7, 1, 1, 1], [1, 1, 1, 8]])
    threads = [threading.Thread(target=call, args=pair) for pair in (("one", IDS), ("other", other))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(results["one"], VISUAL)
    assert torch.equal(results["other"], other > 6)
    assert not model.decoder.context.running


def test_context__a_call_inside_a_call_gives_the_outer_one_its_mask_back(model: Model) -> None:
    seen = []

    class Twice(Model):
        def forward(self, input_ids=None, inputs_embeds=None, mm_token_type_ids=None):
            if input_ids.shape[1] == 4:
                self(input_ids=torch.tensor([[7, 1]]))
                with contextlib.suppress(ValueError):
                    self()  # raises in front of the forward
                seen.append(self.decoder.context.visual)
            return super().forward(input_ids=input_ids)

    twice = Twice()
    twice.decoder.context = ModalityContext.attach(twice, (7, 8))
    assert torch.equal(twice(input_ids=IDS), VISUAL)
    assert torch.equal(seen[0], VISUAL)
    assert not twice.decoder.context.running


def test_context__replicas_and_copies_do_not_share_a_call(model: Model) -> None:
    with model.decoder.context.during(VISUAL):
        other = pickle.loads(pickle.dumps(model.decoder.context))
        assert (other.visual_token_ids, other.visual, other.running) == ((7, 8), None, False)
        assert copy.deepcopy(model).decoder.context.running is False
        assert torch.equal(model.decoder(torch.zeros(2, 4, 3)), VISUAL)
    replicas = [model._replicate_for_data_parallel() for _ in range(2)]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        masks = list(pool.map(lambda replica, ids: replica(input_ids=ids), replicas, (IDS, IDS.flip(1))))
    assert torch.equal(masks[0], VISUAL)
    assert torch.equal(masks[1], VISUAL.flip(1))


def test_context__compiled_once_for_all_threads(model: Model) -> None:
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    frames = torch._dynamo.utils.counters["frames"]
    compiled(input_ids=IDS)
    before = frames["ok"]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        masks = list(pool.map(lambda i: compiled(input_ids=IDS.roll(i, 1)), range(12)))
    assert all(torch.equal(mask, VISUAL.roll(i, 1)) for i, mask in enumerate(masks))
    assert frames["ok"] == before


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_context__under_another_compiler_that_breaks_the_graph(backend: str) -> None:
    """The hook is traced then, and what it writes must be there behind the break."""

    class Breaks(Decoder):
        def forward(self, x: torch.Tensor) -> torch.Tensor | None:
            torch._dynamo.graph_break()
            return super().forward(x)

    torch._dynamo.reset()
    model = Model()
    model.decoder = Breaks()
    model.decoder.context = ModalityContext.attach(model, (7, 8))
    compiled = torch.compile(model, backend=backend)
    for ids in ([[1, 7, 2]], [[8, 8, 1]], [[7, 1, 1]]):
        ids = torch.tensor(ids)
        assert torch.equal(compiled(input_ids=ids), (ids == 7) | (ids == 8))
        assert not model.decoder.context.running


class Checkpointed(nn.Module):
    """A linear of two scales that a backward pass computes again."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.seen: list[Tensor | None] = []

    def layer(self, x: Tensor) -> Tensor:
        visual = self.context.rows(x)
        self.seen.append(visual)
        return x * torch.where(visual, 2.0, 3.0).unsqueeze(-1)

    def forward(self, input_ids: Tensor, x: Tensor) -> Tensor:
        return checkpoint(self.layer, x, use_reentrant=self.reentrant).sin()


@pytest.mark.parametrize("reentrant", [False, True])
def test_rows__of_layers_that_a_backward_pass_computes_again(reentrant: bool) -> None:
    model = Checkpointed(reentrant)
    model.context = ModalityContext.attach(model, (9,))
    ids = [torch.tensor([[9, 1, 9]]), torch.tensor([[1, 9, 1]])]
    xs = [torch.randn(1, 3, 2, requires_grad=True) for _ in ids]
    outputs = [model(i, x) for i, x in zip(ids, xs, strict=True)]
    del model.seen[:]
    sum(y.sum() for y in outputs).backward()
    assert [m.tolist() for m in model.seen] == [(i == 9).tolist() for i in reversed(ids)]
    for i, x in zip(ids, xs, strict=True):
        factor = torch.where(i == 9, 2.0, 3.0).unsqueeze(-1)
        assert_close(x.grad, (x * factor).cos() * factor)
    with pytest.raises(RuntimeError, match="outside a call of the model"):
        model.layer(xs[0])


class Answering(Model):
    """Whose ``generate`` calls a part by itself, as encoders and inner language models are called."""

    def generate(self, input_ids: Tensor, shapes: list[tuple[int, ...]]) -> list[Tensor | None]:
        return [self.decoder(torch.zeros(*shape, 4)) for shape in shapes]


def answers(ids: Tensor, *shapes: tuple[int, ...]) -> list[Tensor | None]:
    model = Answering()
    model.decoder.context = ModalityContext.attach(model, (7, 8))
    return model.generate(ids, list(shapes))


def test_generating__parts_called_by_themselves_have_the_prompts_rows_or_one_of_text() -> None:
    whole, beams, step, flat, flat_step = answers(IDS, (2, 4), (6, 4), (2, 1), (8,), (2,))
    assert torch.equal(whole, VISUAL)
    assert torch.equal(beams, VISUAL.repeat_interleave(3, 0))
    assert step is None
    assert torch.equal(flat, VISUAL.reshape(-1))
    assert flat_step is None


def test_generating__what_is_cached_is_the_prompt_and_text_behind_it() -> None:
    longer, heads = answers(IDS, (2, 7), (2, 1, 5))
    assert torch.equal(longer[:, :4], VISUAL)
    assert not longer[:, 4:].any()
    assert torch.equal(heads[:, 0, :4], VISUAL)


@pytest.mark.parametrize("shape", [(3, 4), (2, 3), (1,), (6,)])
def test_generating__rows_that_do_not_fit_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(RuntimeError, match="ran outside a call"):
        answers(IDS, shape)


def test_generating__ends_with_generate_and_is_a_threads_own() -> None:
    model = Answering()
    model.decoder.context = ModalityContext.attach(model, (7, 8))
    ModalityContext.attach(Answering(), (7,))  # whose class is watched already
    model.generate(IDS, [(2, 4)])
    with pytest.raises(RuntimeError, match="ran outside a call"):
        model.decoder(torch.zeros(2, 4, 4))
    with model.decoder.context.generating(IDS), concurrent.futures.ThreadPoolExecutor(1) as other:
        assert isinstance(other.submit(model.decoder, torch.zeros(2, 4, 4)).exception(), RuntimeError)
        assert torch.equal(model.decoder(torch.zeros(2, 4, 4)), VISUAL)


def test_generating__an_answer_to_what_was_encoded_is_text_and_reads_the_prompt() -> None:
    context = ModalityContext((7, 8))
    step = {"encoder_outputs": (torch.zeros(2, 4, 4),), "decoder_input_ids": torch.tensor([[0], [0]])}
    with context.generating(IDS):
        context.begin(Model(), (), step)
        assert not context.rows(torch.zeros(2, 1, 4)).any()
        assert torch.equal(context.rows(torch.zeros(2, 4, 4)), VISUAL)
        context.end(Model(), (), None)


def test_generating__inside_a_call_what_does_not_fit_is_no_text() -> None:
    context = ModalityContext((7, 8))
    with context.generating(IDS), context.during(VISUAL), pytest.raises(ValueError, match="does not fit"):
        context.rows(torch.zeros(2, 1, 4))
