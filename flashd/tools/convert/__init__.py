"""``flashd convert``: a checkpoint -> a bundle directory (format 1).

from flashd.tools.convert import ConvertOptions, convert
convert(Path("opt-6.7b"), Path("opt-6.7b-bundled"), ConvertOptions(dtype="f16"))
"""

from flashd.tools.convert.options import ConvertOptions, Progress
from flashd.tools.convert.run import convert

__all__ = ["ConvertOptions", "Progress", "convert"]
