"""A refusal as OpenAI's clients read it."""

from mmqc.cli.serving.limits import RequestError


def test_request_error__says_what_where_and_of_which_kind():
    error = RequestError("n = 2: only 1 is supported here", "n")
    assert error.status == 400
    assert error.body() == {
        "error": {"message": "n = 2: only 1 is supported here", "type": "invalid_request_error", "param": "n", "code": None}
    }
    assert RequestError("later", status=429).body()["error"]["type"] == "rate_limit_error"
