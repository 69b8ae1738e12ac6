"""Random names for objects that were created without one: `adjective_surname`.

Threads: any.
"""

from __future__ import annotations

import secrets

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


def random_name(attempt: int = 0) -> str:
    """An `adjective_surname`, followed by a number after too many collisions."""
    name = f"{secrets.choice(ADJECTIVES)}_{secrets.choice(SURNAMES)}"
    if attempt > 4:
        name += str(secrets.randbelow(10 ** (attempt // 10 + 1)))
    return name
