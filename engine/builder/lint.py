"""The checks of a Dockerfile: what is valid but seldom meant. BuildKit's rules, in its words.

Pure. Not here: the documents of `docker build --check` (`calls.py`), the images that stages begin
with (`builder/bases.py`).
Source: https://docs.docker.com/reference/build-checks/, and what dockerd 28.5.2 answers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from engine.builder.dialect import BUILDKIT
from engine.builder.dockerfile import lines, stages
from engine.builder.dockerfile.lines import Document
from engine.builder.dockerfile.scope import ATTESTATIONS, Arguments, Platforms, normalized
from engine.builder.dockerfile.stages import Dockerfile, Image, Stage
from engine.builder.dockerfile.walk import Base, Place, Variables, Walk
from engine.builder.errors import AtLine
from engine.builder.git import source_of_add
from engine.builder.ignore import Patterns
from engine.builder.remote import is_url
from engine.builder.reports import CheckWarning
from engine.common import booleans
from engine.errors import InvalidParameter
from engine.images import reference
from engine.images.instructions import words
from engine.images.instructions.nearest import hint
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
    Run,
    Workdir,
)
from engine.images.instructions.words import Line, Unnumbered

MOST = 1000
"""Warnings of one file; later ones are dropped."""

MOST_INSTRUCTIONS = 2000
"""Of the stages that are checked. A build has fewer."""

_MOST_HINTS = 100
"""Suggestions of other names in one file, which take long to find."""

ARGUMENT = "BUILDKIT_DOCKERFILE_CHECK"
"""The build argument that takes the place of `# check=`."""


class Rule(msgspec.Struct, frozen=True):
    """`experimental`: checked only where the file or the client asks for it."""

    name: str
    description: str
    experimental: bool = False
    documented: bool = True

    @property
    def url(self) -> str:
        """Of its page in Docker's documentation; empty if it has none."""
        if not self.documented:
            return ""
        words = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", self.name)
        return f"https://docs.docker.com/go/dockerfile/rule/{words.lower()}/"


STAGE_NAME_CASING = Rule("StageNameCasing", "Stage names should be lowercase")
FROM_AS_CASING = Rule("FromAsCasing", "The 'as' keyword should match the case of the 'from' keyword")
NO_EMPTY_CONTINUATION = Rule("NoEmptyContinuation", "Empty continuation lines will become errors in a future release")
CONSISTENT_INSTRUCTION_CASING = Rule(
    "ConsistentInstructionCasing",
    "All commands within the Dockerfile should use the same casing (either upper or lower)",
)
DUPLICATE_STAGE_NAME = Rule("DuplicateStageName", "Stage names should be unique")
RESERVED_STAGE_NAME = Rule("ReservedStageName", "Reserved words should not be used as stage names")
JSON_ARGS_RECOMMENDED = Rule(
    "JSONArgsRecommended",
    "JSON arguments recommended for ENTRYPOINT/CMD to prevent unintended behavior related to OS signals",
)
MAINTAINER_DEPRECATED = Rule(
    "MaintainerDeprecated",
    "The MAINTAINER instruction is deprecated, use a label instead to define an image author",
)
UNDEFINED_ARG_IN_FROM = Rule("UndefinedArgInFrom", "FROM command must use declared ARGs")
WORKDIR_RELATIVE_PATH = Rule(
    "WorkdirRelativePath",
    "Relative workdir without an absolute workdir declared within the build can have unexpected results "
    "if the base image changes",
)
UNDEFINED_VAR = Rule("UndefinedVar", "Variables should be defined before their use")
MULTIPLE_INSTRUCTIONS = Rule(
    "MultipleInstructionsDisallowed", "Multiple instructions of the same type should not be used in the same stage"
)
LEGACY_KEY_VALUE_FORMAT = Rule(
    "LegacyKeyValueFormat", "Legacy key/value format with whitespace separator should not be used"
)
INVALID_BASE_IMAGE_PLATFORM = Rule(
    "InvalidBaseImagePlatform", "Base image platform does not match expected target platform", documented=False
)
REDUNDANT_TARGET_PLATFORM = Rule(
    "RedundantTargetPlatform",
    "Setting platform to predefined $TARGETPLATFORM in FROM is redundant as this is the default behavior",
)
SECRETS_USED = Rule("SecretsUsedInArgOrEnv", "Sensitive data should not be used in the ARG or ENV commands")
INVALID_DEFAULT_ARG_IN_FROM = Rule(
    "InvalidDefaultArgInFrom", "Default value for global ARG results in an empty or invalid base image name"
)
PLATFORM_CONSTANT = Rule("FromPlatformFlagConstDisallowed", "FROM --platform flag should not use a constant value")
COPY_IGNORED_FILE = Rule(
    "CopyIgnoredFile", "Attempting to Copy file that is excluded by .dockerignore", experimental=True
)
INVALID_DEFINITION_DESCRIPTION = Rule(
    "InvalidDefinitionDescription",
    "Comment for build stage or argument should follow the format: `# <arg/stage name> <description>`. If this is "
    "not intended to be a description comment, add an empty line or comment between the instruction and the comment.",
    experimental=True,
)
EXPOSE_PROTO_CASING = Rule("ExposeProtoCasing", "Protocol in EXPOSE instruction should be lowercase")
EXPOSE_INVALID_FORMAT = Rule(
    "ExposeInvalidFormat",
    "IP address and host-port mapping should not be used in EXPOSE instruction. "
    "This will become an error in a future release",
)


class Warned(msgspec.Struct, frozen=True):
    """One warning, and the lines that it is about."""

    rule: Rule
    detail: str
    first: int
    last: int

    @property
    def report(self) -> CheckWarning:
        """As builds report it."""
        short = f"{self.rule.name}: {self.detail} (line {self.first})"
        return CheckWarning(short, self.rule.description, self.rule.url, (self.first, self.last))


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """`error`: why the file cannot be built; `place`: its first and last line, if it has one."""

    warnings: tuple[Warned, ...] = ()
    error: str = ""
    place: tuple[int, int] | None = None
    violated: bool = False
    """The error is only that there are warnings."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What is checked beside the file itself. `target`: empty for the last stage. `every`: the
    stages that the target does not need are checked too. `ignored`: of .dockerignore. `replaced`: a
    named context stands for the stage of that name. `refuse`: raises InvalidParameter for an
    instruction, whose variables are replaced, that the build will refuse at that place.
    """

    arguments: Mapping[str, str | None]
    platforms: Platforms
    target: str = ""
    every: bool = False
    ignored: Sequence[str] = ()
    replaced: Callable[[str], bool] = lambda _: False
    refuse: Callable[[Instruction, Place], None] = lambda *_: None


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """Which rules hold."""

    skipped: frozenset[str] = frozenset()
    skips_all: bool = False
    experimental: frozenset[str] = frozenset()
    all_experimental: bool = False
    fails: bool = False
    """A warning is an error."""

    def holds(self, rule: Rule) -> bool:
        if rule.experimental:
            return self.all_experimental or rule.name in self.experimental
        return not self.skips_all and rule.name not in self.skipped


def choice(text: str) -> Choice:
    """The value of `# check=`: `skip=A,B;error=true;experimental=all`. Raises InvalidParameter."""
    found = Choice()
    if not text.strip():
        return found
    for option in text.strip().split(";", 2):
        name, equals, value = (part.strip() for part in option.partition("="))
        names = frozenset(each.strip() for each in value.split(","))
        match name if equals else "":
            case "skip":
                changes = {"skips_all": True} if value == "all" else {"skipped": names}
            case "experimental":
                changes = {"all_experimental": True} if value == "all" else {"experimental": names}
            case "error":
                if value not in booleans.WORDS:
                    raise InvalidParameter(
                        f'failed to parse check option "{option}": strconv.ParseBool: parsing "{value}": invalid syntax'
                    )
                changes = {"fails": booleans.WORDS[value]}
            case _:
                raise InvalidParameter(f'invalid check option "{name if equals else option}"')
        found = msgspec.structs.replace(found, **changes)
    return found


def chosen(document: Document, arguments: Mapping[str, str | None]) -> Choice:
    """Which rules hold for a file. Raises InvalidParameter that says where the fault is."""
    given = arguments.get(ARGUMENT)
    try:
        return choice(document.check.partition(" ")[0] if given is None else given)
    except InvalidParameter as error:
        where = "check options" if given is None else f"build-arg:{ARGUMENT}"
        raise InvalidParameter(f"failed to parse {where}: {error.message}"[:300]) from error


class Check:
    """The check of one file: of its lines and FROM lines first, of `file` then, as soon as the
    bases of its stages are known.
    """

    def __init__(self, raw: bytes, request: Request) -> None:
        self._request = request
        self._warnings: list[Warned] = []
        self._choice = Choice()
        self.failure: InvalidParameter | None = None
        """Why the file cannot be built."""
        self._document = Document()
        self._read: list[Instruction] = []
        self._hints = 0
        self.file: Dockerfile | None = None
        """None if it cannot be built."""
        try:
            self.file = stages.replaced(self._begun(raw), request.replaced)
        except InvalidParameter as error:
            self.failure = error

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Those that are checked, in the order of the file."""
        if self.file is None:
            return ()
        if self._request.every and not self._request.target:
            return self.file.stages
        return tuple(sorted(stages.needed(self.file, self._request.target), key=lambda stage: stage.index))

    @property
    def images(self) -> list[Image]:
        """Those that the stages name."""
        file = self.file
        return [] if file is None else [image for stage in self.stages for image in stages.images(file, stage)]

    def findings(self, base: Callable[[Stage], Base | None], failure: InvalidParameter | None = None) -> Findings:
        """All warnings. `base`: as in `Walk`. `failure`: why the bases are not known."""
        self.failure = self.failure or failure
        if self.file is not None and self.failure is None:
            try:
                self._stages(self.file, base)
            except InvalidParameter as error:
                self.failure = error
        names = list(dict.fromkeys(warned.rule.name for warned in self._warnings))
        if self.failure is not None:
            place = (self.failure.line, self._last(self.failure)) if isinstance(self.failure, AtLine) else None
            return Findings(warnings=tuple(self._warnings), error=self._words(self.failure), place=place)
        if self._choice.fails and names:
            text = f"lint violation found for rules: {', '.join(names)}"
            return Findings(warnings=tuple(self._warnings), error=text, violated=True)
        return Findings(warnings=tuple(self._warnings))

    def _words(self, error: InvalidParameter) -> str:
        """The error as BuildKit has it: with the line as long as instructions are being read."""
        if not isinstance(error, AtLine):
            return error.message
        reading = len(self._read) < len(self._document.lines) and not isinstance(error.__cause__, Unnumbered)
        return f"dockerfile parse error on line {error.line}: {error.reason}" if reading else error.reason

    def _last(self, error: AtLine) -> int:
        """The last line of a fault."""
        return max(error.last, self._document.ends.get(error.line, 0))

    def _warn(self, rule: Rule, detail: str, line: int, last: int = 0) -> None:
        if self._choice.holds(rule) and len(self._warnings) < MOST:
            self._warnings.append(Warned(rule, detail, line, last or self._document.ends.get(line, line)))

    def _hint(self, name: str, names: Iterable[str], sign: str = "") -> str:
        self._hints += 1
        return hint(name, names, sign) if self._hints <= _MOST_HINTS else ""

    # --- lines ------------------------------------------------------------------------------------

    def _begun(self, raw: bytes) -> Dockerfile:
        request = self._request
        if not raw:
            raise InvalidParameter("the Dockerfile cannot be empty")
        self._document = document = lines.parse(raw)
        self._choice = chosen(document, request.arguments)
        for number in document.gaps:
            self._warn(NO_EMPTY_CONTINUATION, "Empty continuation line", number, number)
        for line in document.lines:
            self._line(line)
            self._read.append(instruction := stages.read_line(line, document.escape, BUILDKIT))
            self._description(line, instruction)
        if all(isinstance(each, Arg) for each in self._read):
            raise InvalidParameter("dockerfile contains no stages to build")
        self._stage_names()
        self._casing()
        self._defaults()
        globals_ = self._globals()
        try:
            file = stages.read(
                document,
                request.arguments,
                request.platforms,
                request.target,
                dialect=BUILDKIT,
                instructions=self._read,
            )
        except InvalidParameter as error:
            unset = self._bases(globals_, error.line if isinstance(error, AtLine) else document.lines[-1].number)
            suggested = next((hint for name in unset if (hint := self._hint(name, globals_))), "")
            if not isinstance(error, AtLine) or not suggested:
                raise
            raise AtLine(error.message, error.line, f"{error.reason}{suggested}") from error
        self._bases(globals_, document.lines[-1].number)
        try:
            stages.target_index(file, request.target)
        except InvalidParameter:
            names = (stage.name for stage in file.stages if stage.name)
            text = f'target stage "{request.target}" could not be found{self._hint(request.target, names)}'
            raise InvalidParameter(text[:300]) from None
        return file

    def _line(self, line: Line) -> None:
        if line.keyword == "MAINTAINER":
            self._warn(
                MAINTAINER_DEPRECATED, "Maintainer instruction is deprecated in favor of using label", line.number
            )
        given = words.plain_words(line.rest)
        if line.keyword != "FROM" or len(given) < 3:
            return
        keyword, between = line.original[:4], given[1]
        if len(given) == 3 and given[2] != given[2].lower():
            self._warn(STAGE_NAME_CASING, f"Stage name '{given[2]}' should be lowercase", line.number)
        if _is_consistent(keyword) and between != (between.lower() if keyword.islower() else between.upper()):
            self._warn(FROM_AS_CASING, f"'{between}' and '{keyword}' keywords' casing do not match", line.number)

    def _description(self, line: Line, instruction: Instruction) -> None:
        comments = self._document.comments.get(line.number)
        if not comments:
            return
        names = [name for name, _ in instruction.pairs] if isinstance(instruction, Arg) else []
        if isinstance(instruction, From) and instruction.name:
            names = [instruction.name]
        if names and comments[-1].split(" ")[0] not in names:
            shown = names[0] if len(names) == 1 else "<arg_key>"
            self._warn(
                INVALID_DEFINITION_DESCRIPTION,
                f"Comment for {line.keyword} should follow the format: `# {shown} <description>`",
                line.number,
            )

    def _stage_names(self) -> None:
        seen: set[str] = set()
        for each in self._read:
            if isinstance(each, From) and each.name:
                if each.name in ("context", stages.SCRATCH):
                    self._warn(
                        RESERVED_STAGE_NAME,
                        f'Stage name should not use the same name as reserved stage "{each.name}"',
                        each.line,
                    )
                if each.name in seen:
                    self._warn(
                        DUPLICATE_STAGE_NAME,
                        f'Duplicate stage name "{each.name}", stage names should be unique',
                        each.line,
                    )
                seen.add(each.name)

    def _casing(self) -> None:
        """Instructions in another case than most. Those before the first FROM do not count."""
        begin = next((at for at, each in enumerate(self._read) if isinstance(each, From)), len(self._read))
        named = [(each, _keyword(each)) for each in self._read[begin:]]
        lower = sum(word.islower() for _, word in named)
        upper = sum(word.isupper() for _, word in named)
        case, changed = ("lowercase", str.lower) if lower > upper else ("uppercase", str.upper)
        for each, word in named:
            if word != changed(word):
                self._warn(
                    CONSISTENT_INSTRUCTION_CASING,
                    f"Command '{word}' should match the case of the command majority ({case})",
                    each.line,
                )

    def _globals(self) -> Collection[str]:
        """Names that FROM lines may use, in their order."""
        found = dict.fromkeys(self._request.platforms.variables())
        for each in self._before_stages():
            found |= dict.fromkeys(name for name, _ in each.pairs)
        return found.keys()

    def _before_stages(self) -> Iterable[Arg]:
        for each in self._read:
            if not isinstance(each, Arg):
                return
            yield each

    def _defaults(self) -> None:
        """FROM lines whose image is not valid if the client gives no arguments."""
        escape = self._document.escape
        arguments = Arguments({}, self._request.platforms, self._request.target, BUILDKIT)
        try:
            for each in self._before_stages():
                arguments.declare_global(each, escape)
            for found in self._read:
                if isinstance(found, From):
                    name = words.expanded(found.image, arguments.global_variables(), escape)
                    if not _is_reference(name):
                        self._warn(
                            INVALID_DEFAULT_ARG_IN_FROM,
                            f"Default value for ARG {found.image} results in empty or invalid base image name",
                            found.line,
                        )
        except InvalidParameter:  # the build will say it
            return

    def _bases(self, names: Collection[str], last: int) -> list[str]:
        """Check the FROM lines up to the line `last`. Returns the unset names in its platform."""
        escape, request = self._document.escape, self._request
        arguments = Arguments(request.arguments, request.platforms, request.target, BUILDKIT)
        unset: list[str] = []
        try:
            for argument in self._before_stages():
                arguments.declare_global(argument, escape)
        except InvalidParameter:
            return unset
        for instruction in self._read:
            if not isinstance(instruction, From) or instruction.line > last:
                continue
            unset = []
            for text in filter(None, (instruction.image, instruction.platform)):
                variables = Variables(arguments.global_variables())
                try:
                    value = words.expanded(text, variables, escape)
                except InvalidParameter:
                    value = ""
                for name in dict.fromkeys(variables.missing):
                    if name not in names:
                        detail = f"FROM argument '{name}' is not declared{self._hint(name, names)}"
                        self._warn(UNDEFINED_ARG_IN_FROM, detail, instruction.line)
                if text == instruction.platform:
                    unset = variables.missing
                    self._platform(instruction, value, variables)
        return unset

    def _platform(self, found: From, value: str, variables: Variables) -> None:
        if variables.found or variables.missing:
            target = self._request.platforms.target
            if variables.found == {"TARGETPLATFORM"} and not variables.missing and value == target:
                self._warn(
                    REDUNDANT_TARGET_PLATFORM,
                    f"Setting platform to predefined {found.platform} in FROM is redundant as this is the default "
                    "behavior",
                    found.line,
                )
            return
        try:
            system, architecture = normalized(value).split("/")[:2]
        except InvalidParameter:
            return
        if system not in found.name and architecture not in found.name:
            self._warn(PLATFORM_CONSTANT, f'FROM --platform flag should not use constant value "{value}"', found.line)

    # --- stages -----------------------------------------------------------------------------------

    def _stages(self, file: Dockerfile, base: Callable[[Stage], Base | None]) -> None:
        walk = Walk(file, base)
        checked = {stage.index for stage in self.stages}
        count = sum(len(stage.instructions) for stage in self.stages)
        if count > MOST_INSTRUCTIONS:
            raise InvalidParameter(f"the Dockerfile has {count} instructions of at most {MOST_INSTRUCTIONS}")
        ignored = Patterns(self._request.ignored) if self._choice.holds(COPY_IGNORED_FILE) else Patterns()
        reached = {stage.index for stage in stages.needed(file, self._request.target)}
        for stage in file.stages:
            if stage.index not in checked:
                continue
            image = base(stage) if stage.parent is None and stage.base != stages.SCRATCH else None
            self._base_platform(stage, image)
            place = walk.enter(stage)
            if place is None:
                continue
            if stage.index not in reached:
                place.triggers.clear()
            once: dict[type[Instruction], int] = {}
            for instruction in walk.instructions(stage, place):
                try:
                    self._order(file, stage, instruction)
                    self._instruction(place, instruction, once, ignored)
                except AtLine:
                    raise
                except InvalidParameter as error:
                    raise lines.at_line(error, instruction.line, instruction.text) from error

    def _order(self, file: Dockerfile, stage: Stage, instruction: Instruction) -> None:
        """Refuse a source that is a later stage, unless an image replaces it."""
        for name, other in stages.sources(file, stage, instruction):
            replaced = other is not None and other.name and self._request.replaced(other.name)
            if other is None or other.index < stage.index or replaced:
                continue
            if isinstance(instruction, Run):
                target = next(mount.target for mount in instruction.mounts if mount.from_ == name)
                raise InvalidParameter(
                    f'cannot mount from stage "{name}" to "{target}", stage needs to be defined before current command'
                )
            own = stage.name or f"stage-{stage.index}"
            raise InvalidParameter(
                f'cannot copy from stage "{name}", it needs to be defined before current stage "{own}"'
            )

    def _base_platform(self, stage: Stage, base: Base | None) -> None:
        wanted = stage.platform or self._request.platforms.target
        if base is not None and base.platform and base.platform.split("/")[:2] != wanted.split("/")[:2]:
            self._warn(
                INVALID_BASE_IMAGE_PLATFORM,
                f'Base image {stage.base} was pulled with platform "{base.platform}", expected "{wanted}" '
                "for current build",
                stage.line,
            )

    def _instruction(
        self, place: Place, instruction: Instruction, once: dict[type[Instruction], int], ignored: Patterns
    ) -> None:
        line, keyword = instruction.line, _keyword(instruction)
        had_shell, had_workdir = place.has_shell, place.has_workdir
        variables = place.variables()
        try:
            expanded = place.expand(instruction, variables)
        finally:
            if not isinstance(instruction, Expose):
                self._undefined(line, variables, place)
        self._request.refuse(expanded, place)
        place.leave(expanded)
        if isinstance(expanded, Cmd | Entrypoint | Healthcheck):
            if before := once.get(type(expanded)):
                self._warn(
                    MULTIPLE_INSTRUCTIONS,
                    f"Multiple {keyword} instructions should not be used in the same stage because only the last one "
                    "will be used",
                    before,
                )
            once[type(expanded)] = line
        match expanded:
            case Cmd() | Entrypoint() if isinstance(expanded.command, str) and not had_shell:
                self._warn(
                    JSON_ARGS_RECOMMENDED,
                    f"JSON arguments recommended for {keyword} to prevent unintended behavior related to OS signals",
                    line,
                )
            case Env() | Label():
                self._pairs(expanded, keyword)
            case Arg():
                for name, _ in expanded.pairs:
                    self._secret("ARG", name, line)
            case Workdir() if not had_workdir and not expanded.path.startswith("/"):
                self._warn(
                    WORKDIR_RELATIVE_PATH,
                    f"Relative workdir {_quoted(expanded.path)} can have unexpected results if the base image changes",
                    line,
                )
            case Expose():
                self._ports(expanded)
            case Copy() | Add() if not expanded.from_:
                self._sources(expanded, ignored)

    def _undefined(self, line: int, variables: Variables, place: Place) -> None:
        for name in dict.fromkeys(variables.missing):
            if name not in place.declared and name not in ATTESTATIONS:
                names = (each for each in place.names if each in variables)
                self._warn(UNDEFINED_VAR, f"Usage of undefined variable '${name}'{self._hint(name, names, '$')}", line)

    def _pairs(self, instruction: Env | Label, keyword: str) -> None:
        if instruction.legacy:
            self._warn(
                LEGACY_KEY_VALUE_FORMAT,
                f'"{keyword} key=value" should be used instead of legacy "{keyword} key value" format',
                instruction.line,
            )
        if isinstance(instruction, Env):
            for name, _ in instruction.pairs:
                self._secret("ENV", name, instruction.line)

    def _secret(self, keyword: str, name: str, line: int) -> None:
        if _SECRET.search(name) and not _NO_SECRET.search(name):
            self._warn(
                SECRETS_USED, f"Do not use ARG or ENV instructions for sensitive data ({keyword} {_quoted(name)})", line
            )

    def _ports(self, instruction: Expose) -> None:
        for port in instruction.ports:
            protocol = port.partition("/")[2]
            if protocol != protocol.lower():
                self._warn(
                    EXPOSE_PROTO_CASING,
                    f"Defined protocol '{port}' in EXPOSE instruction should be lowercase",
                    instruction.line,
                )
            if port.rpartition(":")[0]:
                self._warn(
                    EXPOSE_INVALID_FORMAT,
                    f"EXPOSE instruction should not define an IP address or host-port mapping, found '{port}'",
                    instruction.line,
                )

    def _sources(self, instruction: Copy | Add, ignored: Patterns) -> None:
        for source in instruction.sources:
            fetched = isinstance(instruction, Add) and (is_url(source) or source_of_add(source) is not None)
            if not fetched and ignored.excluded(source):
                verb = "Add" if isinstance(instruction, Add) else "Copy"
                self._warn(
                    COPY_IGNORED_FILE,
                    f"Attempting to {verb} file {_quoted(source)} that is excluded by .dockerignore",
                    instruction.line,
                )


_WORDS = "apikey|auth|credentials?|key|password|pword|passwd|secret|token"
_SECRET = re.compile(rf"(?:_|^)(?:{_WORDS})(?:_|$)", re.IGNORECASE)
_NO_SECRET = re.compile(r"(?:_|^)public(?:_|$)", re.IGNORECASE)


def _keyword(instruction: Instruction) -> str:
    """The first word as it is written."""
    return instruction.text.split(maxsplit=1)[0]


def _is_consistent(word: str) -> bool:
    return word in (word.lower(), word.upper())


def _is_reference(name: str) -> bool:
    try:
        reference.parse(name)
    except InvalidParameter:
        return False
    return True


def _quoted(text: str) -> str:
    """As Go's `%q` for printable text."""
    return json.dumps(text, ensure_ascii=False)


__all__ = ["ARGUMENT", "Check", "Choice", "Findings", "Request", "Rule", "Warned", "choice", "chosen"]
