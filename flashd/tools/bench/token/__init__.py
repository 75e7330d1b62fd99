"""``flashd bench token``: time per token, from reading everything to the whole method."""

from flashd.tools.bench.token.options import FULL_TOKENS, TokenOptions
from flashd.tools.bench.token.report import TokenReport, TokenRow
from flashd.tools.bench.token.run import bench_token

__all__ = ["FULL_TOKENS", "TokenOptions", "TokenReport", "TokenRow", "bench_token"]
