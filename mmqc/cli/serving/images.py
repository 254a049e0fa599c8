"""Images of a request: base64 in data URLs, measured before they are opened.

Addresses and paths are refused: the server would read for a stranger what it alone may read.
"""

from __future__ import annotations

import base64
import binascii
import re
import warnings
from io import BytesIO
from typing import Any

from mmqc.cli.serving.limits import RequestError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
DATA_URL = re.compile(r"data:image/[\w.+-]+(?:;[\w.+-]+=[\w.+-]+)*;base64,", re.IGNORECASE)


def open_image(url: Any, param: str, pixels: int) -> Any:
    """The image of a data URL, upright and in RGB.

    Args:
        url: "data:image/png;base64,...".
        param: the field that it stands in, for the message.
        pixels: how many it may have.

    Raises:
        RequestError: it is no data URL, no still image of ``FORMATS``, damaged, or too large.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    header = DATA_URL.match(url) if isinstance(url, str) else None
    if header is None:
        raise RequestError("an image has to come as data:image/<format>;base64,<bytes>; addresses and paths are not read", param)
    try:
        raw = base64.b64decode(url[header.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"the image is no base64 ({error})", param) from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # measured against ``pixels`` below
            image = Image.open(BytesIO(raw), formats=FORMATS)
        if image.width * image.height > pixels:
            raise RequestError(f"the image has {image.width} x {image.height} pixels; {pixels:,} are left to this request", param)
        if getattr(image, "n_frames", 1) > 1:
            raise RequestError(f"the image has {getattr(image, 'n_frames', 1)} frames; send the one that is meant", param)
        return ImageOps.exif_transpose(image).convert("RGB")
    except UnidentifiedImageError as error:
        raise RequestError(f"the image is none that can be read; {', '.join(FORMATS)} can", param) from error
    except Image.DecompressionBombError as error:
        raise RequestError(f"the image is too large ({error})", param) from error
    except RequestError:
        raise
    except (OSError, ValueError, SyntaxError, EOFError) as error:  # what PIL says to files that are damaged
        raise RequestError(f"the image is damaged ({error})", param) from error
