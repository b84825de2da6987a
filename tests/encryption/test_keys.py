"""Keys by role: what a public context holds, where keys lie, and what is found of a secret key that was left in."""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from splitfed.core.errors import InvalidInput
from splitfed.encryption import backend
from splitfed.encryption.key_search import find_secret_key_files, find_secret_keys
from splitfed.encryption.keys import (
    KeyHolder,
    PublicContext,
    from_uint8,
    load_keys,
    load_public_context,
    make_keys,
    to_uint8,
)
from splitfed.encryption.parameters import PRESETS
from splitfed.training import checkpoint
from tests.encryption.examples import keys


@pytest.fixture(scope="module")
def holder() -> KeyHolder:
    return keys("sums")


@pytest.fixture(scope="module")
def secret(holder: KeyHolder, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("secret") / "keys"
    holder.save(path)
    return path.read_bytes()


def test_every_key_pair_is_another(holder: KeyHolder) -> None:
    torch.manual_seed(0)
    first = make_keys(PRESETS["sums"])
    torch.manual_seed(0)
    assert len({first.fingerprint, make_keys(PRESETS["sums"]).fingerprint, holder.fingerprint}) == 3


def test_a_public_context_crosses_and_has_no_secret_key(holder: KeyHolder) -> None:
    public = holder.public
    arrived = load_public_context(public.to_tensor())
    assert arrived.fingerprint == public.fingerprint == holder.fingerprint
    assert arrived.parameters == PRESETS["sums"]
    assert [level.last_prime.bit_length() for level in arrived.levels] == [54]
    assert not arrived.has_rotations
    with pytest.raises(InvalidInput, match="make the keys with rotations=True"):
        _ = arrived.rotation_keys
    for context in (public, arrived):
        assert not context.context.has_secret_key()
        context.make_encryptor()
        _ = context.evaluator, context.encoder, context.relinearization_keys
        assert find_secret_keys([context, context.to_tensor()], public) == []


def test_a_context_with_its_secret_key_is_refused_where_a_public_one_belongs(holder: KeyHolder, secret: bytes) -> None:
    with pytest.raises(InvalidInput, match="a public context must not have a secret key"):
        PublicContext(holder.parameters, holder.fingerprint, holder._context)
    with pytest.raises(InvalidInput, match="the public context holds no public context but a secret keys"):
        load_public_context(to_uint8(secret))
    # Somebody who writes a private context under a public header.
    body = holder._context.serialize(True, True, False, True)
    from splitfed.encryption.keys import _PUBLIC, _frame

    forged = _frame(_PUBLIC, holder.parameters, holder.fingerprint, False, body)
    with pytest.raises(InvalidInput, match="must not have a secret key"):
        load_public_context(to_uint8(forged))


def _closure(value: object) -> Callable[[], object]:
    return lambda: value


# What a server could be left with by mistake: each holds a secret key, in another form.
LEAKS: dict[str, Callable[[KeyHolder, bytes], object]] = {
    "key holder": lambda holder, _: holder,
    "TenSEAL's context": lambda holder, _: [holder._context],
    "a secret key": lambda holder, _: {"a": holder._context.secret_key()},
    "a decryptor, in a closure": lambda holder, _: _closure(holder.decryptor),
    "an encrypted vector of the private context": lambda holder, _: backend.import_tenseal().ckks_vector(
        holder._context, [1.0]
    ),
    "an encryptor": lambda holder, _: holder._context.encryptor(),
    "bytes": lambda _, secret: secret,
    "a view of bytes": lambda _, secret: memoryview(b"before" + secret),
    "a tensor": lambda _, secret: to_uint8(b"x" * 7 + secret),
    "a window on a tensor": lambda _, secret: to_uint8(secret)[:3],
    "an array": lambda _, secret: np.frombuffer(secret, np.uint8),
    "a key as SEAL writes it": lambda holder, _: backend.to_bytes(holder._context.secret_key().data),
}


@pytest.mark.parametrize("leak", LEAKS.values(), ids=LEAKS)
def test_a_secret_key_that_was_left_in_is_found(
    holder: KeyHolder, secret: bytes, leak: Callable[[KeyHolder, bytes], object]
) -> None:
    public = holder.public
    clean = {"context": public, "bytes": public.to_tensor(), "numbers": torch.zeros(3)}
    assert find_secret_keys(clean, public) == []
    assert find_secret_keys({**clean, "left in": leak(holder, secret)}, public)


def test_a_public_context_that_keeps_its_secret_key_is_found(
    holder: KeyHolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The mutation: a key holder whose public context is the private one, and which is not refused.
    monkeypatch.setattr(PublicContext, "__post_init__", lambda self: None)
    left_in = PublicContext(holder.parameters, holder.fingerprint, holder._context)
    assert find_secret_keys({"server": left_in}, holder.public) == ["Context", "TenSEALContext"]


def test_files_with_a_secret_key_are_found(holder: KeyHolder, secret: bytes, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    public = holder.public.to_tensor()
    checkpoint.save(tmp_path / "deep", 0, {"run": {"context": public}})
    assert find_secret_key_files(tmp_path, holder.public) == []
    for held in (to_uint8(secret), secret):
        checkpoint.save(tmp_path / "deep", 0, {"run": {"context": public, "state": held}})
        (found,) = find_secret_key_files(tmp_path, holder.public)
        assert found.startswith(str(tmp_path / "deep" / "000000" / "run.safetensors"))


def test_keys_return_from_their_file(tmp_path: Path) -> None:
    holder = keys("sums", rotations=True)
    path = tmp_path / "keys"
    holder.save(path)
    if sys.platform != "win32":
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = load_keys(path)
    assert again.fingerprint == holder.fingerprint
    assert again.public.has_rotations
    with pytest.raises(InvalidInput, match="exists already"):
        again.save(path)


def test_no_key_lies_in_the_folder_of_a_run_or_a_study(holder: KeyHolder, tmp_path: Path) -> None:
    run, study, plain = tmp_path / "run", tmp_path / "study", tmp_path / "plain"
    for folder, files in ((run, ["run.json"]), (study, ["study.toml", "config.toml"]), (plain, ["study.toml"])):
        folder.mkdir()
        for name in files:
            (folder / name).write_text("")
    (run / "below").mkdir()
    (plain / "link").symlink_to(run / "below", target_is_directory=True)
    for path in (run / "keys", run / "below" / "keys", study / "keys", plain / "link" / "keys"):
        with pytest.raises(InvalidInput, match=r"the folder of a run or a study.* keep keys elsewhere"):
            holder.save(path)
        assert not path.exists()
        with pytest.raises(InvalidInput, match="the folder of a run or a study"):
            load_keys(path)
    holder.save(plain / "keys")
    with pytest.raises(InvalidInput, match=re.escape("cannot be written")):
        holder.save(plain / "nowhere" / "keys")


def _flip(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda _: b"", "holds no secret keys"),
        (lambda _: b"-----BEGIN", "holds no secret keys"),
        (lambda c: c[:-1], "is corrupted or truncated"),
        (lambda c: c[:300], "is corrupted"),
        (lambda c: c[:30], "is corrupted: its header cannot be read"),
        (lambda c: _flip(c, len(c) // 2), "is corrupted or truncated"),
        (lambda c: c.replace(b'"degree": 4096', b'"degree": 8192'), "is corrupted: its keys do not match"),
        (lambda c: c.replace(b'"scale_bits": 40', b'"scale_bits": 39'), "is corrupted: its keys do not match"),
        (lambda c: re.sub(rb'"fingerprint": ".', b'"fingerprint": "x', c), "is corrupted: its header cannot be read"),
        (
            lambda c: re.sub(rb'"fingerprint": "\w{32}', b'"fingerprint": "' + b"0" * 32, c),
            "is corrupted: its keys do not match",
        ),
    ],
)
def test_a_bad_key_file_is_one_line(secret: bytes, tmp_path: Path, change: Callable[[bytes], bytes], text: str) -> None:
    path = tmp_path / "keys"
    path.write_bytes(change(secret))
    path.chmod(0o600)
    with pytest.raises(InvalidInput, match=re.escape(text)) as caught:
        load_keys(path)
    assert "\n" not in str(caught.value)
    assert repr(str(path)) in str(caught.value)


def test_a_key_file_that_is_missing_or_open_to_others_is_one_line(secret: bytes, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="is missing; without it, data encrypted under its keys cannot be decrypted"):
        load_keys(tmp_path / "keys")
    if sys.platform == "win32":
        pytest.skip("files have no modes there")
    path = tmp_path / "keys"
    path.write_bytes(secret)
    path.chmod(0o640)
    with pytest.raises(InvalidInput, match=r"is open to other users \(mode 640\); chmod 600 it"):
        load_keys(path)
    with pytest.raises(InvalidInput, match="cannot be read"):
        load_keys(tmp_path)


def test_a_public_context_as_a_key_file_is_one_line(holder: KeyHolder, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_bytes(from_uint8(holder.public.to_tensor()))
    path.chmod(0o600)
    with pytest.raises(InvalidInput, match="holds no secret keys but a public context"):
        load_keys(path)


def test_bytes_pass_through_a_folder_where_there_is_no_file_in_memory(
    holder: KeyHolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = holder._context.secret_key().data
    expected = backend.to_bytes(key)
    monkeypatch.delattr(os, "memfd_create", raising=False)
    assert backend.to_bytes(key) == expected
    assert find_secret_keys(expected, holder.public)


def test_without_the_package_one_line_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, *rest: Any) -> Any:
        if name.startswith("tenseal"):
            raise ImportError(name)
        return original(name, *rest)

    import builtins

    original = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", refuse)
    assert PRESETS["depth_2"].ciphertext_bytes[-1] == 331312
    with pytest.raises(InvalidInput, match=re.escape("encryption needs the package tenseal: pip install")):
        make_keys(PRESETS["sums"])
