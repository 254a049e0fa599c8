"""Why mmqc is worse where it is: a sentence for each such row of the page, by sample, form, mmqc's recipe and the peer."""

from __future__ import annotations

REASONS: dict[tuple[str, str, str, str], str] = {
    ("digits", "W3 g128 sym", "gptq", "llmcompressor gptq"): (
        "by NLL mmqc's is lower; GPTQ's descent, which takes most off the error on stress, adds the KL: with"
        " `mmqc.solvers.gptq.ROUNDS = 0` the row is a tie"
    ),
    ("digits", "W2 g32 sym", "gptq", "llmcompressor gptq"): (
        "by NLL a tie; on the same batches the peer's rounding in mmqc has mmqc's KL, not the peer's, but on others less: the"
        " search for clips costs 0.0015 there, on average, and saves 0.8 on stress"
    ),
    ("digits", "W2 g64 sym", "awq+gptq", "llmcompressor awq+gptq"): (
        "by NLL a tie; the search for clips again, which on stress brings KL from 0.038 to 0.012"
    ),
    ("digits", "W2 g32 asym", "awq+gptq", "llmcompressor awq+gptq"): (
        "unexplained: AWQ's other losses and GPTQ without its descent leave KL at 0.003 to 0.004; on stress the row is a tie"
    ),
    ("stress", "W2 g64 sym", "learned", "llmcompressor awq+gptq"): (
        "gradients alone against AWQ's factors, without which no method comes near on this sample; mmqc's counterpart is"
        " awq+learned, a tie"
    ),
}
