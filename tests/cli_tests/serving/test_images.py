"""Images of a request: what is opened, and what is refused before it is."""

import base64
import zlib
from io import BytesIO

import pytest
from PIL import Image

from mmqc.cli.serving.images import open_image
from mmqc.cli.serving.limits import RequestError

MANY = 10**9


def data_url(image, form="PNG", **options):
    buffer = BytesIO()
    image.save(buffer, form, **options)
    return f"data:image/{form.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def bomb(side):
    """A PNG of few bytes that says it has side x side pixels, as large files do: all of them black."""

    def chunk(kind, data):
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    header = side.to_bytes(4, "big") * 2 + bytes([1, 0, 0, 0, 0])
    pixels = zlib.compress(bytes(side // 8 + 1) * 64)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(png).decode()


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF"])
def test_open_image__of_every_format(form):
    image = open_image(data_url(Image.new("RGB", (3, 2), "red"), form), "here", MANY)
    assert (image.mode, image.size) == ("RGB", (3, 2))
    assert image.getpixel((0, 0))[0] > 250


def test_open_image__is_upright_and_without_alpha():
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    assert open_image(data_url(Image.new("RGB", (3, 2)), "JPEG", exif=exif), "here", MANY).size == (2, 3)
    assert open_image(data_url(Image.new("RGBA", (1, 1), (1, 2, 3, 0))), "here", MANY).mode == "RGB"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://127.0.0.1/a.png", "addresses and paths are not read"),
        ("/etc/passwd", "addresses and paths are not read"),
        (__file__, "addresses and paths are not read"),
        ("iVBORw0KGgo=", "addresses and paths are not read"),
        (None, "addresses and paths are not read"),
        ("data:image/png;base64,%%%", "no base64"),
        ("data:image/png;base64,", "none that can be read"),
        ("data:image/png;base64," + base64.b64encode(b"%PDF-1.4 " * 9).decode(), "none that can be read"),
        ("data:image/svg+xml;base64," + base64.b64encode(b"<svg/>").decode(), "none that can be read"),
        (data_url(Image.effect_noise((40, 40), 9))[:-900], "damaged"),
        (bomb(5_000), "5000 x 5000 pixels; 1,000 are left"),
        (bomb(40_000), "too large"),
    ],
)
def test_open_image__refuses(url, words):
    with pytest.raises(RequestError, match=words) as info:
        open_image(url, "messages[0].content[1].image_url", 1_000 if "5000" in words else 1_000_000)
    assert (info.value.param, info.value.status) == ("messages[0].content[1].image_url", 400)


def test_open_image__refuses_a_film():
    frames = [Image.new("RGB", (2, 2), color) for color in ("red", "blue")]
    with pytest.raises(RequestError, match="2 frames"):
        open_image(data_url(frames[0], "GIF", save_all=True, append_images=frames[1:]), "here", MANY)
