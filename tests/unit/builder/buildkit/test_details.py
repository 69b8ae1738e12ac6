"""The details of a failure, as BuildKit's clients read them."""

from __future__ import annotations

import base64
import json

from engine.builder.buildkit import details
from engine.builder.buildkit.details import Lines, Named
from engine.rpc import protobuf
from tests.support.builds.sessions import fields


def test_where_in_the_dockerfile_it_is() -> None:
    value = details.encoded(2, "it failed", Lines("sub/Dockerfile", b"FROM a\nRUN b\n", ((2, 3),)))
    status = fields(base64.b64decode(value + "=" * (-len(value) % 4)))
    assert (status[1], status[2]) == (2, b"it failed")
    found = fields(status[3])
    assert found[1] == b"github.com/moby/buildkit/errdefs.Source+json"
    assert json.loads(found[2]) == {
        "info": {
            "filename": "sub/Dockerfile",
            "data": base64.b64encode(b"FROM a\nRUN b\n").decode(),
            "language": "Dockerfile",
        },
        "ranges": [{"start": {"line": 2}, "end": {"line": 3}}],
    }


def test_several_places_are_several_details() -> None:
    places = tuple((line, line) for line in (4, 2, 7, 5, 9))
    status = protobuf.decode(details.status(2, "", Lines("Dockerfile", b"FROM a\n", places)), details._Status)
    assert [json.loads(each.value)["ranges"][0]["start"]["line"] for each in status.details] == [4, 2, 7, 5]


def test_a_file_that_does_not_fit_into_a_trailer() -> None:
    assert details.encoded(2, "it failed", Lines("Dockerfile", b"x" * (details.LARGEST + 1), ((1, 1),))) == ""


def test_what_the_frontend_does_not_have() -> None:
    value = details.encoded(12, "unsupported", Named("Subrequest", "frontend.x"))
    found = fields(fields(base64.b64decode(value + "=" * (-len(value) % 4)))[3])
    assert found[1] == b"github.com/moby/buildkit/errdefs.Subrequest+json"
    assert json.loads(found[2]) == {"name": "frontend.x"}


def test_the_vertex_that_has_failed() -> None:
    status = fields(details.status(2, "it failed", None, "sha256:abc"))
    found = fields(status[3])
    assert found[1] == b"github.com/moby/buildkit/errdefs.Vertex+json"
    assert json.loads(found[2]) == {"digest": "sha256:abc"}
