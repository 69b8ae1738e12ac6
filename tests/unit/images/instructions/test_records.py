"""Instructions: what each line becomes, and the words of each error."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidParameter
from engine.images.instructions import records, words
from engine.images.instructions.records import (
    Add,
    Arg,
    Cmd,
    Copy,
    Entrypoint,
    Env,
    Expose,
    From,
    Healthcheck,
    Instruction,
    Label,
    Maintainer,
    OnBuild,
    Run,
    RunMount,
    Shell,
    StopSignal,
    User,
    Volume,
    Workdir,
)
from engine.images.instructions.words import Heredoc

V = {"A": "one", "B": "two words", "EMPTY": "", "PORTS": "80 81/udp", "PATH": "/bin"}
SECOND = 10**9


def read(text: str, escape: str = "\\") -> Instruction:
    first, _, rest = text.partition("\n")
    line = words.with_heredocs(words.line(first, 3), words.Source(rest.splitlines(keepends=True)))
    instruction = records.read(line, escape)
    records.check(instruction, escape)
    return instruction


def plain(instruction: Instruction) -> Instruction:
    """Without what every record has."""
    return msgspec.structs.replace(instruction, line=0, text="")


READ: list[tuple[str, Instruction]] = [
    ("FROM busybox", From(image="busybox")),
    ("from a:1@sha256:x AS Build-1.x", From(image="a:1@sha256:x", name="build-1.x")),
    ("FROM a as b", From(image="a", name="b")),
    ("FROM --platform=linux/arm64 a", From(image="a", platform="linux/arm64")),
    ("FROM --platform=$BUILDPLATFORM ${A}:$B AS c", From(image="${A}:$B", name="c", platform="$BUILDPLATFORM")),
    ("MAINTAINER A B <a@b.c>", Maintainer(author="A B <a@b.c>")),
    ('MAINTAINER "quotes stay"', Maintainer(author='"quotes stay"')),
    ("RUN echo  a   b", Run(command="echo  a   b")),
    ("RUN\techo\ta", Run(command="echo\ta")),
    ('RUN ["a", "b c"]', Run(command=("a", "b c"))),
    ('RUN ["a", "b c"] tail', Run(command=("a", "b c"))),
    ("RUN ['a']", Run(command="['a']")),
    ("RUN [ -f x ] && y", Run(command="[ -f x ] && y")),
    ("RUN --network=none a", Run(command="a", network="none")),
    ("RUN --network=host --security=insecure a", Run(command="a", network="host", security="insecure")),
    ("RUN -- --x", Run(command="--x")),
    ("RUN", Run(command="")),
    ("RUN cat <<A\nx\nA", Run(command="cat <<A", heredocs=(Heredoc(name="A", content="x\n"),))),
    ("CMD echo $A", Cmd(command="echo $A")),
    ('CMD ["$A", "b"]', Cmd(command=("$A", "b"))),
    ("CMD []", Cmd(command=())),
    ("CMD", Cmd(command="")),
    ("ENTRYPOINT a b", Entrypoint(command="a b")),
    ('ENTRYPOINT [ "a" ]', Entrypoint(command=("a",))),
    ("ENTRYPOINT []", Entrypoint(command=())),
    ("ENTRYPOINT", Entrypoint(command="")),
    ("ENV a=b", Env(pairs=(("a", "b"),))),
    (
        "ENV a=b c='d e' f=\"g\" h=i\\ j k=",
        Env(pairs=(("a", "b"), ("c", "'d e'"), ("f", '"g"'), ("h", "i\\ j"), ("k", ""))),
    ),
    ("ENV a b c=d", Env(pairs=(("a", "b c=d"),), legacy=True)),
    ("ENV a\tb", Env(pairs=(("a", "b"),), legacy=True)),
    ("ENV a=b=c", Env(pairs=(("a", "b=c"),))),
    ("LABEL a=b 'c d'=e", Label(pairs=(("a", "b"), ("'c d'", "e")))),
    ("LABEL a b c", Label(pairs=(("a", "b c"),), legacy=True)),
    ("ARG a", Arg(pairs=(("a", None),))),
    ("ARG a=", Arg(pairs=(("a", ""),))),
    ("ARG a=b", Arg(pairs=(("a", "b"),))),
    ("ARG a='b c' d e=f", Arg(pairs=(("a", "'b c'"), ("d", None), ("e", "f")))),
    ("EXPOSE 443 80/udp 8000-8001", Expose(ports=("443", "80/udp", "8000-8001"))),
    ("EXPOSE 9 80", Expose(ports=("80", "9"))),
    ("EXPOSE $PORTS 127.0.0.1:80:81", Expose(ports=("$PORTS", "127.0.0.1:80:81"))),
    ("VOLUME /a /b", Volume(paths=("/a", "/b"))),
    ('VOLUME ["/a b", "/c"]', Volume(paths=("/a b", "/c"))),
    ("VOLUME '/a' /b\\ c", Volume(paths=("'/a'", "/b\\", "c"))),
    ("USER a:b", User(user="a:b")),
    ("USER a b", User(user="a b")),
    ("WORKDIR /a b/$c", Workdir(path="/a b/$c")),
    ("STOPSIGNAL SIGRTMIN+3", StopSignal(signal="SIGRTMIN+3")),
    ("STOPSIGNAL 9", StopSignal(signal="9")),
    ("STOPSIGNAL $S", StopSignal(signal="$S")),
    ('SHELL ["/bin/bash", "-c"]', Shell(command=("/bin/bash", "-c"))),
    ("HEALTHCHECK NONE", Healthcheck(test=("NONE",))),
    ("HEALTHCHECK none", Healthcheck(test=("NONE",))),
    ("HEALTHCHECK CMD a b", Healthcheck(test=("CMD-SHELL", "a b"))),
    ('HEALTHCHECK cmd ["a", "b"]', Healthcheck(test=("CMD", "a", "b"))),
    (
        "HEALTHCHECK --interval=1m30s --timeout=1.5s --start-period=2ms --start-interval=1h --retries=3 CMD a",
        Healthcheck(
            test=("CMD-SHELL", "a"),
            interval=90 * SECOND,
            timeout=SECOND * 3 // 2,
            start_period=2 * 10**6,
            start_interval=3600 * SECOND,
            retries=3,
        ),
    ),
    ("HEALTHCHECK --interval=0s --timeout=0 --retries=0 CMD a", Healthcheck(test=("CMD-SHELL", "a"))),
    ("HEALTHCHECK CMD --interval=3s", Healthcheck(test=("CMD-SHELL", "--interval=3s"))),
    ("ONBUILD RUN a  b", OnBuild(trigger="RUN a  b")),
    ("onbuild copy --from=x a b", OnBuild(trigger="copy --from=x a b")),
    ("ONBUILD later a", OnBuild(trigger="later a")),
    ("ONBUILD RUN <<A\nx\nA", OnBuild(trigger="RUN <<A\nx\nA")),
    ("COPY a b", Copy(sources=("a",), destination="b")),
    ("COPY a b c/", Copy(sources=("a", "b"), destination="c/")),
    ('COPY ["a b", "c"]', Copy(sources=("a b",), destination="c")),
    ("COPY a\\ b c", Copy(sources=("a\\", "b"), destination="c")),
    (
        "COPY --from=0 --chown=u:g --chmod=755 --link --parents --exclude=*.md --exclude=x a b",
        Copy(
            sources=("a",),
            destination="b",
            from_="0",
            chown="u:g",
            chmod="755",
            link=True,
            parents=True,
            exclude=("*.md", "x"),
        ),
    ),
    ("COPY --link=false --parents=TRUE a b", Copy(sources=("a",), destination="b", parents=True)),
    ("COPY --chmod=u=rwX,go=rX a b", Copy(sources=("a",), destination="b", chmod="u=rwX,go=rX")),
    ("COPY --chmod=$M a b", Copy(sources=("a",), destination="b", chmod="$M")),
    (
        "COPY <<A x <<-'B' /c/\na\nA\n\tb\n\tB\n",
        Copy(
            sources=("x",),
            destination="/c/",
            heredocs=(records.Inline("A", "a\n", True), records.Inline("B", "b\n", False)),
        ),
    ),
    ("ADD a b", Add(sources=("a",), destination="b")),
    ("ADD https://x/y.git#v1:d /e", Add(sources=("https://x/y.git#v1:d",), destination="/e")),
    (
        "ADD --checksum=sha256:aa --keep-git-dir --unpack=false --chown=1 a b",
        Add(sources=("a",), destination="b", checksum="sha256:aa", keep_git_dir=True, unpack=False, chown="1"),
    ),
]


@pytest.mark.parametrize(("text", "expected"), READ, ids=lambda value: value if isinstance(value, str) else "")
def test_read(text: str, expected: Instruction) -> None:
    found = read(text)
    assert found.line == 3 and found.text == text.partition("\n")[0]
    assert plain(found) == expected
    if not isinstance(expected, From | Maintainer | OnBuild):
        again = records.read_text(text.rstrip("\n") if "\n" in text else text)
        assert plain(again) == expected


def test_a_run_without_words() -> None:
    run = read("RUN []")
    assert isinstance(run, Run) and run.command == ()


ERRORS = [
    ("FOO", "unknown instruction: FOO"),
    ("foo bar", "unknown instruction: FOO"),
    ("FROM", "FROM requires either one or three arguments"),
    ("FROM a b", "FROM requires either one or three arguments"),
    ("FROM a foo b", "FROM requires either one or three arguments"),
    ("FROM a as 1b", 'invalid name for build stage: "1b", name can\'t start with a number or contain symbols'),
    ("FROM a as b/c", "invalid name for build stage"),
    ("ENV", "ENV requires at least one argument"),
    ("LABEL", "LABEL requires at least one argument"),
    ("EXPOSE", "EXPOSE requires at least one argument"),
    ("VOLUME", "VOLUME requires at least one argument"),
    ("VOLUME []", "VOLUME requires at least one argument"),
    ("ONBUILD", "ONBUILD requires at least one argument"),
    ("SHELL", "SHELL requires at least one argument"),
    ("SHELL []", "SHELL requires at least one argument"),
    ("SHELL a", "SHELL requires the arguments to be in JSON form"),
    ("MAINTAINER", "MAINTAINER requires exactly one argument"),
    ("USER", "USER requires exactly one argument"),
    ("WORKDIR", "WORKDIR requires exactly one argument"),
    ("STOPSIGNAL", "STOPSIGNAL requires exactly one argument"),
    ("ARG", "ARG requires at least one argument"),
    ("ADD", "ADD requires at least two arguments"),
    ("ADD a", "ADD requires at least two arguments, but only one was provided."),
    ("COPY a", "COPY requires at least two arguments, but only one was provided. Destination could not be determined"),
    ('COPY ["a"]', "COPY requires at least two arguments"),
    ("ENV a", "ENV must have two arguments"),
    ("LABEL a", "LABEL must have two arguments"),
    ("ENV a=b c", 'Syntax error - can\'t find = in "c". Must be of the form: name=value'),
    ("LABEL a=b 'c d'", "Syntax error - can't find = in \"'c d'\". Must be of the form: name=value"),
    ("ENV =b", "ENV names can not be blank"),
    ("ENV ''=b", "invalid environment variable: =b: names can not be blank"),
    ("LABEL --x", "unknown flag: --x"),
    ("LABEL =b", "LABEL names can not be blank"),
    ("ARG =b", "ARG names can not be blank"),
    ("VOLUME '/a b'", "looking for matching single-quote"),
    ("VOLUME ''", "VOLUME specified can not be an empty string"),
    ('VOLUME ["/a", " "]', "VOLUME specified can not be an empty string"),
    ("EXPOSE 65536", "invalid containerPort: 65536"),
    ("EXPOSE 80-79", "invalid containerPort: 80-79"),
    ("EXPOSE a", "invalid containerPort: a"),
    ("EXPOSE 70000-70001/tcp", "invalid containerPort: 70000-70001"),
    ("EXPOSE 80/Foo", 'invalid port: "80/Foo": invalid proto: Foo'),
    ("EXPOSE 70000/foo", 'invalid port: "70000/foo": invalid proto: foo'),
    ("EXPOSE /tcp", 'invalid port: "/tcp": no port specified'),
    ("EXPOSE 80:", 'invalid port: "80:": no port specified'),
    ("EXPOSE 70000:80", "invalid hostPort: 70000"),
    ("EXPOSE 1-3:80-81", "invalid ranges specified for container and host Ports: 80-81 and 1-3"),
    ("EXPOSE 1.2.3:80:80", "invalid IP address: 1.2.3"),
    ("EXPOSE 1:2:3:4", "invalid IP address: 1:2"),
    ("STOPSIGNAL FOO", "invalid signal: FOO"),
    ("STOPSIGNAL 65", "invalid signal: 65"),
    ("STOPSIGNAL 0", "invalid signal: 0"),
    ("HEALTHCHECK", "HEALTHCHECK requires at least one argument"),
    ("HEALTHCHECK NONE a", "HEALTHCHECK NONE takes no arguments"),
    ("HEALTHCHECK CMD", "Missing command after HEALTHCHECK CMD"),
    ("HEALTHCHECK CMD []", "Missing command after HEALTHCHECK CMD"),
    ("HEALTHCHECK foo a", 'Unknown type "FOO" in HEALTHCHECK (try CMD)'),
    ("HEALTHCHECK --interval=-1s CMD a", 'Interval "interval" cannot be less than 1ms'),
    ("HEALTHCHECK --start-period=1us CMD a", 'Interval "start-period" cannot be less than 1ms'),
    ("HEALTHCHECK --timeout=5 CMD a", 'time: missing unit in duration "5"'),
    ("HEALTHCHECK --timeout=1.5s2 CMD a", 'time: missing unit in duration "1.5s2"'),
    ("HEALTHCHECK --timeout=1x CMD a", 'time: unknown unit "x" in duration "1x"'),
    ("HEALTHCHECK --timeout=1m-1s CMD a", 'time: unknown unit "m-" in duration "1m-1s"'),
    ("HEALTHCHECK --timeout=.s CMD a", 'time: invalid duration ".s"'),
    ("HEALTHCHECK --timeout=1h. CMD a", 'time: invalid duration "1h."'),
    ("HEALTHCHECK --timeout=- CMD a", 'time: invalid duration "-"'),
    ("HEALTHCHECK --timeout=99999999h CMD a", "time: invalid duration"),
    ("HEALTHCHECK --retries=-1 CMD a", "--retries cannot be negative (-1)"),
    ("HEALTHCHECK --retries=x CMD a", 'strconv.ParseInt: parsing "x": invalid syntax'),
    ("HEALTHCHECK --foo=1 CMD a", "unknown flag: --foo"),
    ("ONBUILD ONBUILD RUN a", "Chaining ONBUILD via `ONBUILD ONBUILD` isn't allowed"),
    ("ONBUILD FROM a", "FROM isn't allowed as an ONBUILD trigger"),
    ("ONBUILD maintainer a", "MAINTAINER isn't allowed as an ONBUILD trigger"),
    ("ONBUILD COPY a", "COPY requires at least two arguments"),
    ("ONBUILD ENV a", "ENV must have two arguments"),
    ("RUN --foo a", "unknown flag: --foo"),
    ("ENV --a=b c=d", "unknown flag: --a"),
    ("ENV --a=b c", "ENV must have two arguments"),
    ("CMD --x a", "unknown flag: --x"),
    ("FROM --from=a b", "unknown flag: --from"),
    ("ADD --from=a b c", "unknown flag: --from"),
    ("COPY --checksum=a b c", "unknown flag: --checksum"),
    ("COPY --chown=a --chown=b c d", "duplicate flag specified: --chown"),
    ("COPY --link --link c d", "duplicate flag specified: --link"),
    ("COPY --chown a b", "missing a value on flag: --chown"),
    ("COPY --link= a b", "missing a value on flag: --link"),
    ("COPY --exclude a b", "missing a value on flag: --exclude"),
    ("COPY --link=maybe a b", "expecting boolean value for flag --link, not: maybe"),
    ("COPY --chmod=888 a b", "invalid chmod parameter: '888'. it should be octal string and between 0 and 07777"),
    ("COPY --chmod=17777 a b", "invalid chmod parameter"),
    ("COPY --chmod=u+q a b", "invalid chmod parameter"),
    ("COPY --from=$A a b", "variable expansion is not supported for --from, define a new stage with FROM"),
    ("COPY a <<A\nx\nA", "COPY cannot accept a heredoc as a destination"),
    ("COPY https://a/b /c", "source can't be a URL for COPY"),
    ("RUN --network=foo a", 'invalid network mode "foo"'),
    ("RUN --security=foo a", 'security "foo" is not valid'),
    ("RUN [1]", "when using JSON array syntax, arrays must be comprised of strings only"),
    ('CMD ["a", 1]', "when using JSON array syntax, arrays must be comprised of strings only"),
    ('COPY ["a", null]', "when using JSON array syntax, arrays must be comprised of strings only"),
    ("ENV a='b", "unexpected end of statement while looking for matching single-quote"),
    ('WORKDIR "b', "unexpected end of statement while looking for matching double-quote"),
    ("COPY 'a b", "looking for matching single-quote"),
    ("USER ${a", "missing '}'"),
    ("ARG a=${b:=c}", "unsupported modifier (:=) in substitution"),
    ("EXPOSE ${", "missing '}'"),
    ("VOLUME ${}", "bad substitution"),
    ("STOPSIGNAL ${a^}", "unsupported modifier (^) in substitution"),
    ("FROM ${a:b}", "unsupported modifier (:b) in substitution"),
    ("COPY <<A /x\n${a:=b}\nA", "unsupported modifier (:=) in substitution"),
]


@pytest.mark.parametrize(("text", "message"), ERRORS, ids=lambda text: text[:40])
def test_errors(text: str, message: str) -> None:
    with pytest.raises(InvalidParameter) as error:
        read(text)
    assert message in error.value.message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ONBUILD RUN a", "onbuild isn't allowed as an ONBUILD trigger"),
        ("FROM a", "from isn't allowed as an ONBUILD trigger"),
        ("Maintainer a", "maintainer isn't allowed as an ONBUILD trigger"),
        ("RUN a\nRUN b", "must be one instruction"),
        ("RUN <<A\nA\nx", "must be one instruction"),
        ("", "unknown instruction: "),
        ("foo", "unknown instruction: FOO"),
    ],
)
def test_triggers_of_a_base_image(text: str, message: str) -> None:
    with pytest.raises(InvalidParameter) as error:
        records.read_text(text)
    assert message in error.value.message


EXPANDED: list[tuple[str, Instruction]] = [
    ("ENV $A=$B ${NONE:-x}='$A'", Env(pairs=(("one", "two words"), ("x", "$A")))),
    ('ENV a "$B" b', Env(pairs=(("a", "two words b"),), legacy=True)),
    ("LABEL a=$A $NONE=b", Label(pairs=(("a", "one"), ("", "b")))),
    ("ARG a=$A b", Arg(pairs=(("a", "one"), ("b", None)))),
    ("COPY $A 'b' ${NONE:-/c}/", Copy(sources=("one", "b"), destination="/c/")),
    ('COPY ["$A b", "\'c\'"]', Copy(sources=("one b",), destination="c")),
    (
        "COPY --chown=$A:${A} --chmod=${EMPTY:-755} --exclude=$A/* a b",
        Copy(sources=("a",), destination="b", chown="one:one", chmod="755", exclude=("one/*",)),
    ),
    (
        "COPY <<A <<'B' /x\n$A '$B'\nA\n$A\nB\n",
        Copy(
            sources=(),
            destination="/x",
            heredocs=(records.Inline("A", "one 'two words'\n", False), records.Inline("B", "$A\n", False)),
        ),
    ),
    ("ADD --checksum=sha256:$A a b", Add(sources=("a",), destination="b", checksum="sha256:one")),
    ("EXPOSE $PORTS 1", Expose(ports=("80", "81/udp", "1"))),
    ("EXPOSE $NONE", Expose(ports=())),
    ("VOLUME $A '/b'", Volume(paths=("one", "/b"))),
    ('VOLUME ["/$A"]', Volume(paths=("/one",))),
    ("USER ${NONE:-nobody}", User(user="nobody")),
    ("WORKDIR /$B", Workdir(path="/two words")),
    ("STOPSIGNAL ${NONE-9}", StopSignal(signal="9")),
    ("FROM $A", From(image="one")),
    ("FROM --platform=$A x:${NONE-1}", From(image="x:1", platform="one")),
    # no variables in these
    ("RUN $A", Run(command="$A")),
    ("CMD $A", Cmd(command="$A")),
    ('ENTRYPOINT ["$A"]', Entrypoint(command=("$A",))),
    ("HEALTHCHECK CMD $A", Healthcheck(test=("CMD-SHELL", "$A"))),
    ("ONBUILD ENV a=$A", OnBuild(trigger="ENV a=$A")),
    ("MAINTAINER $A", Maintainer(author="$A")),
    ('SHELL ["$A"]', Shell(command=("$A",))),
]


@pytest.mark.parametrize(("text", "expected"), EXPANDED, ids=lambda value: value if isinstance(value, str) else "")
def test_expand(text: str, expected: Instruction) -> None:
    assert plain(records.expand(read(text), V)) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ENV $NONE=x", "invalid environment variable: =x: names can not be blank"),
        ("ARG $NONE", "names can not be blank"),
        ("VOLUME $NONE", "VOLUME specified can not be an empty string"),
        ("EXPOSE $B", "invalid containerPort: two"),
        ("STOPSIGNAL $A", "invalid signal: one"),
        ("USER ${NONE:?who}", "NONE: who"),
        ("COPY ${NONE:-http://x} b", "source can't be a URL for COPY"),
        ("COPY --chmod=$A a b", "invalid chmod parameter: 'one'"),
        ("RUN --mount=target=/x,type=$A a", 'unsupported mount type "one"'),
    ],
)
def test_values_that_are_refused_when_they_are_known(text: str, message: str) -> None:
    instruction = read(text)
    with pytest.raises(InvalidParameter) as error:
        records.expand(instruction, V)
    assert message in error.value.message


def test_the_escape_of_the_file_holds_in_words() -> None:
    assert plain(records.expand(read(r"ENV a=b` c d=\e", "`"), {}, "`")) == Env(pairs=(("a", "b c"), ("d", r"\e")))
    assert plain(records.expand(read(r"WORKDIR C:\a", "`"), {}, "`")) == Workdir(path=r"C:\a")


def test_bytes_that_are_not_utf_8() -> None:
    """File names and the contents of files keep them; a JSON document cannot."""
    env = read("ENV a=\udce9 b=é")
    assert isinstance(env, Env) and env.pairs == (("a", "\ufffd"), ("b", "é"))
    assert env.text == "ENV a=\ufffd b=é"
    copy = read("COPY --chown=\udce9 \udce9 <<A \udce9/\n\udce9\nA")
    assert isinstance(copy, Copy)
    assert (copy.sources, copy.destination, copy.chown) == (("\udce9",), "\ufffd/", "\ufffd")
    assert copy.heredocs[0].content == "\udce9\n" and copy.text == "COPY --chown=\ufffd \ufffd <<A \ufffd/"
    for text, expected in (("RUN <<A\n\udce9\nA", "\ufffd\n"), ("RUN a <<A\n\udce9\nA", "a <<A\n\ufffd\nA")):
        run = read(text)
        assert isinstance(run, Run) and records.script(run) == (expected, None)
    run = read("RUN <<A\n#!\udce9\nA")
    assert isinstance(run, Run) and records.script(run)[1] == b"#!\xe9\n"
    trigger = read("ONBUILD COPY \udce9 <<A /\n\udce9\nA")
    assert isinstance(trigger, OnBuild) and trigger.trigger == "COPY \ufffd <<A /\n\ufffd\nA"


@pytest.mark.parametrize("text", ["ENV a=\0", "RUN a\0", "RUN <<A\n\0\nA", 'CMD ["\\u0000"]', "ONBUILD RUN a\0"])
def test_nul_characters_are_refused(text: str) -> None:
    with pytest.raises(InvalidParameter, match="NUL"):
        read(text)


# --- RUN --mount ----------------------------------------------------------------------------------


MOUNTS: list[tuple[str, RunMount]] = [
    ("target=/a", RunMount(target="/a")),
    ("type=bind,target=/a", RunMount(target="/a")),
    ("type=bind,from=b,source=/s,dst=/a,rw", RunMount(target="/a", from_="b", source="/s", read_only=False)),
    ("type=BIND,src=s,destination=/a,ro", RunMount(target="/a", source="s")),
    ("target=/a,readwrite=true", RunMount(target="/a", read_only=False)),
    ("target=/a,rw=false", RunMount(target="/a")),
    ("target=/a,readonly=0", RunMount(target="/a", read_only=False)),
    ('type=bind,"target=/a,b"', RunMount(target="/a,b")),
    ("type=cache,target=/a", RunMount(type="cache", target="/a", sharing="shared", read_only=False)),
    (
        "type=cache,target=a,id=b,sharing=locked,mode=0700,uid=1,gid=2,from=c,source=d,ro",
        RunMount(
            type="cache",
            target="a",
            id="b",
            sharing="locked",
            mode=0o700,
            uid=1,
            gid=2,
            from_="c",
            source="d",
            read_only=True,
        ),
    ),
    ("type=tmpfs,target=/t", RunMount(type="tmpfs", target="/t", read_only=False)),
    ("type=tmpfs,target=/t,size=64m", RunMount(type="tmpfs", target="/t", size=64 << 20, read_only=False)),
    ("type=tmpfs,target=/t,size=1.5GiB", RunMount(type="tmpfs", target="/t", size=3 << 29, read_only=False)),
    ("type=secret,id=k", RunMount(type="secret", id="k", target="/run/secrets/k")),
    ("type=secret,id=a/k", RunMount(type="secret", id="a/k", target="/run/secrets/k")),
    ("type=secret,source=k", RunMount(type="secret", id="k", source="k", target="/run/secrets/k")),
    ("type=secret,target=/x/k", RunMount(type="secret", id="k", target="/x/k")),
    (
        "type=secret,id=k,target=/x,required,mode=0440,uid=5",
        RunMount(type="secret", id="k", target="/x", required=True, mode=0o440, uid=5),
    ),
    ("type=secret,id=k,env=K", RunMount(type="secret", id="k", env="K")),
    ("type=secret,id=k,env=K,target=/x", RunMount(type="secret", id="k", env="K", target="/x")),
    ("type=ssh", RunMount(type="ssh")),
    ("type=ssh,id=a,required=true", RunMount(type="ssh", id="a", required=True)),
]


@pytest.mark.parametrize(("text", "expected"), MOUNTS, ids=lambda value: value if isinstance(value, str) else "")
def test_mounts(text: str, expected: RunMount) -> None:
    found = read(f"RUN --mount='{text}' a")
    assert isinstance(found, Run) and found.mounts == (expected,)
    assert records.expand(found, V) == found


def test_several_mounts() -> None:
    found = read("RUN --mount=type=ssh --mount=type=tmpfs,target=/t a")
    assert isinstance(found, Run) and [mount.type for mount in found.mounts] == ["ssh", "tmpfs"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("type=foo,target=/a", 'unsupported mount type "foo"'),
        ("target=/a,foo=b", "unexpected key 'foo' in 'foo=b'"),
        ("target=/a,foo", "invalid field 'foo' must be a key=value pair"),
        ("target", "invalid field 'target' must be a key=value pair"),
        ("target=/a,ro=maybe", "invalid value for ro: maybe"),
        ("target=/a,mode=0700", 'mode not allowed for "bind" type mounts'),
        ("type=tmpfs,target=/a,uid=1", 'uid not allowed for "tmpfs" type mounts'),
        ("target=/a,gid=1", 'gid not allowed for "bind" type mounts'),
        ("type=cache,target=/a,mode=9", "invalid value 9 for mode"),
        ("type=cache,target=/a,uid=-1", "invalid value -1 for uid"),
        ("type=cache,target=/a,gid=x", "invalid value x for gid"),
        ("type=cache,target=/a,uid=99999999999", "invalid value 99999999999 for uid"),
        ("type=cache,target=/a,sharing=none", 'unsupported sharing value "none"'),
        ("target=/a,sharing=shared", "invalid cache sharing set for bind mount"),
        ("target=/a,required", "unexpected key 'required' for mount type 'bind'"),
        ("target=/a,size=1", "unexpected key 'size' for mount type 'bind'"),
        ("type=tmpfs,target=/a,size=x", "invalid value for size: x"),
        ("type=ssh,env=A", "unexpected key 'env' for mount type 'ssh'"),
        ("type=secret", "invalid secret mount. one of source, target required"),
        ("type=secret,id=a,source=b", "both source and id can't be set"),
        ("type=secret,id=a,from=b", "secret mount should not have a from"),
        ("type=secret,id=a,sharing=locked", "secret mount should not define sharing"),
        ("target=/a,from=$X", "'from' doesn't support variable expansion, define alias stage instead"),
        ('"target=/a', "failed to parse csv mounts"),
        ("target=${a", "missing '}'"),
    ],
)
def test_mounts_that_are_none(text: str, message: str) -> None:
    with pytest.raises(InvalidParameter) as error:
        read(f"RUN --mount='{text}' a")
    assert message in error.value.message


def test_variables_in_mounts() -> None:
    found = read("RUN --mount=type=$T,target=/c/$A,id=$A,uid=$U --mount=type=secret,id=$A a")
    assert isinstance(found, Run) and len(found.mounts) == 2
    expanded = records.expand(found, V | {"T": "cache", "U": "7"})
    assert isinstance(expanded, Run)
    assert expanded.mounts == (
        RunMount(type="cache", target="/c/one", id="one", uid=7, sharing="shared", read_only=False),
        RunMount(type="secret", id="one", target="/run/secrets/one"),
    )


# --- scripts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("RUN a b", ("a b", None)),
        ('RUN ["a"]', (("a",), None)),
        ("RUN <<A\nx\ny\nA\n", ("x\ny\n", None)),
        ("RUN <<-A\n\tx\n\tA\n", ("x\n", None)),
        ("RUN <<A\n#!/bin/sh\nx\nA\n", ("/dev/pipes/A", b"#!/bin/sh\nx\n")),
        ("RUN <<-A\n\t#!/bin/sh\n\tA\n", ("/dev/pipes/A", b"#!/bin/sh\n")),
        ("RUN cat <<A >x\n$y\nA\n", ("cat <<A >x\n$y\nA", None)),
        ("RUN cat <<A <<-B\nx\nA\n\ty\n\tB\n", ("cat <<A <<-B\nx\nA\n\ty\nB", None)),
        ("RUN python3 <<'A'\n#!x\nA\n", ("python3 <<'A'\n#!x\nA", None)),
    ],
)
def test_scripts(text: str, expected: tuple[Any, bytes | None]) -> None:
    found = read(text)
    assert isinstance(found, Run) and records.script(found) == expected


# --- any text -------------------------------------------------------------------------------------


@given(
    st.sampled_from(sorted(records._READERS)),
    st.text(alphabet="ab1$ {}:-+?'\"\\=#%/*\n\t,[]<.&|\udc80é\x00", max_size=40),
    st.sampled_from(["\\", "`"]),
)
def test_any_line(keyword: str, text: str, escape: str) -> None:
    """Read or refused; what is read can be expanded or is refused; no other exception."""
    try:
        found = read(f"{keyword} {text}", escape)
        expanded = records.expand(found, {"a": "1", "b": "x y", "ab": ""}, escape)
    except InvalidParameter as error:
        assert error.message
        return
    assert type(expanded) is type(found)
    assert hash(expanded) == hash(expanded)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("80", ["80/tcp"]),
        ("80/UDP", ["80/udp"]),
        ("80/", ["80/tcp"]),
        ("80-82/sctp", ["80/sctp", "81/sctp", "82/sctp"]),
        ("8080:80", ["80/tcp"]),
        ("127.0.0.1:8080:80/tcp", ["80/tcp"]),
        ("[::1]::80", ["80/tcp"]),
        ("1-3:80", ["80/tcp"]),
        ("0-1", ["0/tcp", "1/tcp"]),
        ("+0080", ["80/tcp"]),
        ("1-65535", [f"{port}/tcp" for port in range(1, 65536)]),
    ],
)
def test_ports(text: str, expected: list[str]) -> None:
    assert records.ports_of(text) == expected


@pytest.mark.parametrize("text", ["KILL", "sigkill", "SIGRTMIN", "RTMIN+1", "SIGRTMAX-2", "9", "64", "SIGPOLL", "CLD"])
def test_signals(text: str) -> None:
    records.check_signal(text)
