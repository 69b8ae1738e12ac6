"""Names and ids of containers: the random `adjective_surname`, the pattern, and the resolution of a
client's reference to an id.

Owns: the index of taken names and known ids. Not here: the containers themselves (`store.py`).
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_left, insort

from engine.errors import Conflict, InvalidParameter, NotFound

PATTERN = re.compile(r"/?[a-zA-Z0-9][a-zA-Z0-9_.-]*")
"""Docker Engine API, ContainerCreate, `name`; one letter is enough here."""

ADJECTIVES = """
    able agile alert amber ample apt arctic ardent astute autumn avid azure balmy bold brave breezy bright brisk
    calm candid cheery civil clear clever cobalt cool coral crisp curious daring deft eager early earnest easy fair
    fearless fine firm fleet fond frank fresh frosty gentle glad golden grand green happy hardy hearty honest humble
    icy ideal jolly jovial keen kind lively logical loyal lucid lucky mellow merry mild modest neat nimble noble
    open patient placid plain polite prime proud quick quiet rapid ready robust rustic sage serene sharp silent
    silver simple sleek smart snowy solar solid sound spry stable stellar still stoic sturdy sunny swift tidy tranquil
    trusty upbeat valiant vivid warm wise witty zesty
""".split()  # noqa: SIM905 - a list of quoted words would be a page long

SURNAMES = """
    abel agnesi allen ampere babbage backus bardeen bartik bell bernoulli bohr boole borg bose brahe brahmagupta
    brattain carson cauchy cayley cerf chandrasekhar church codd cohn colden conway cori cray curie curry darwin
    davinci dijkstra dirac einstein elgamal elion engelbart euclid euler faraday feistel fermat fermi feynman fourier
    franklin galileo galois galton gauss germain goedel goldberg golick goodall gould grothendieck haibt hamilton
    hamming hardy hawking heisenberg herschel hertz heyrovsky hilbert hodgkin hoover hopper huygens hypatia jackson
    jemison jennings johnson joliot kalam kalman keller kepler khayyam kilby kirch knuth kolmogorov kowalevski lagrange
    lamarr lamport laplace leavitt leibniz lewin lichterman liskov lovelace lumiere mahavira maxwell mayer mccarthy
    mcclintock mclean meitner mendel mendeleev milner minsky mirzakhani morse nash neumann newton nightingale nobel
    noether noyce panini pare pascal pasteur payne perlman pike planck poincare poisson ptolemy raman ramanujan
    rhodes riemann ritchie roentgen rosalind rubin saha sammet shannon shaw shirley shockley sinoussi snyder stallman
    stonebraker swanson swartz swirles tesla thompson torvalds turing varahamihira visvesvaraya volhard wescoff wiles
    williams wilson wing wirth wozniak wright yalow yonath
""".split()  # noqa: SIM905 - a list of quoted words would be a page long


class Names:
    """Every container's id and name.

    Resolves references: a name with or without `/`, an id, a unique prefix of an id.
    """

    def __init__(self) -> None:
        self._ids: list[str] = []
        self._owner: dict[str, str] = {}

    def add(self, container_id: str, name: str) -> None:
        """Take `name` for the id.

        Raises Conflict with Docker's words, naming the holder, when it is taken.
        """
        self.reserve(container_id, name)
        insort(self._ids, container_id)

    def reserve(self, container_id: str, name: str) -> None:
        """Take `name` alone, such as the new one of a rename."""
        holder = self._owner.setdefault(name, container_id)
        if holder != container_id:
            raise Conflict(
                f'Conflict. The container name "/{name}" is already in use by container "{holder}". '
                "You have to remove (or rename) that container to be able to reuse that name."
            )

    def release(self, name: str) -> None:
        """Free `name`."""
        self._owner.pop(name, None)

    def discard(self, container_id: str, name: str) -> None:
        """Forget the id and its name."""
        self.release(name)
        at = bisect_left(self._ids, container_id)
        if at < len(self._ids) and self._ids[at] == container_id:
            del self._ids[at]

    def find(self, name: str) -> str | None:
        """The id of the container with that name; None when no container has it."""
        return self._owner.get(name)

    def resolve(self, text: str) -> str:
        """Resolves `text`: a whole id, otherwise a name, otherwise an id's unique prefix.

        Raises NotFound, or InvalidParameter when ambiguous.
        """
        at = bisect_left(self._ids, text)
        if at < len(self._ids) and self._ids[at] == text:
            return text
        owner = self._owner.get(text.removeprefix("/"))
        if owner is not None:
            return owner
        if text and at < len(self._ids) and self._ids[at].startswith(text):
            if at + 1 < len(self._ids) and self._ids[at + 1].startswith(text):
                raise InvalidParameter(f"multiple IDs found with provided prefix: {text}")
            return self._ids[at]
        raise NotFound(f"No such container: {text}")

    def random(self) -> str:
        """A free `adjective_surname`, followed by a number after too many collisions."""
        for attempt in range(100):
            name = f"{secrets.choice(ADJECTIVES)}_{secrets.choice(SURNAMES)}"
            if attempt > 4:
                name += str(secrets.randbelow(10 ** (attempt // 10 + 1)))
            if name not in self._owner:
                return name
        return secrets.token_hex(16)


def checked_name(name: str) -> str:
    """`name` without its leading slash. Raises InvalidParameter when it breaks the pattern."""
    if not PATTERN.fullmatch(name):
        raise InvalidParameter(f"Invalid container name ({name}), only [a-zA-Z0-9][a-zA-Z0-9_.-] are allowed")
    return name.removeprefix("/")
