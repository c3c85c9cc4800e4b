"""What is shown to others has no names of hosts or users, no addresses and no paths."""

from __future__ import annotations

import json
import string
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock.doctor.gpu.outcome import without_names

NAMES = st.text(string.ascii_lowercase + string.digits + "-", min_size=3, max_size=12).filter(
    lambda name: name[0].isalpha() and name.strip("-") == name
)
PARTS = st.text(string.ascii_letters + string.digits + "._-+", min_size=1, max_size=8)
PATHS = st.lists(PARTS, min_size=1, max_size=4).map(lambda parts: "/" + "/".join(parts))
BETWEEN = st.sampled_from([" ", "=", ": ", "'", '"', ", ", "(", "\n", "@"])


@given(
    host=NAMES,
    user=NAMES,
    path=PATHS,
    address=st.ip_addresses(),
    marks=st.lists(BETWEEN, min_size=5, max_size=5),
)
def test_no_name_address_or_path_is_left(
    host: str, user: str, path: str, address: object, marks: list[str]
) -> None:
    hidden = [host, user, path, str(address)]
    text = "".join(f"{mark}{each}" for mark, each in zip(marks, hidden, strict=False)) + marks[-1]
    shown = json.dumps(without_names({"said": [text], text: 1}, {host: "<host>", user: "<user>"}))
    words = shown.replace("<host>", "").replace("<user>", "").replace("<address>", "").replace("<path>", "")
    assert path not in words
    assert str(address) not in words
    for name in (host, user):
        assert name not in words.replace("said", ""), shown


def test_files_of_known_packages_are_named() -> None:
    file = Path(penstock.__file__).parent / "device.py"
    assert without_names(f'File "{file}", line 3', {}) == 'File "penstock/device.py", line 3'
    above = file.parent / ".." / "secret"
    assert without_names(str(above), {}) == "<path>"
    assert without_names("CUDA 12.8, 3/4 of 20 GiB/s and 0.1.0", {}) == "CUDA 12.8, 3/4 of 20 GiB/s and 0.1.0"
