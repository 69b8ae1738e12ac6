# Maps of user and group ids, for archives of containers in user namespaces: see
# system/user_namespaces.py. Functions are inline: there is no idmap.pyx.

from libc.stdint cimport uint32_t
from libc.stdlib cimport free, malloc

cdef enum:
    OVERFLOW = 65534                    # shown for an id without a mapping, as by the kernel


cdef struct IdRange:
    uint32_t begin
    uint32_t other                      # what `begin` becomes
    uint32_t count


cdef struct IdMap:
    IdRange *uids                       # NULL: ids stay as they are
    IdRange *gids
    size_t uid_count
    size_t gid_count


cdef inline IdRange *id_ranges(tuple given, size_t *count) except NULL:
    cdef IdRange *ranges = <IdRange *>malloc((len(given) + 1) * sizeof(IdRange))
    if ranges == NULL:
        raise MemoryError
    count[0] = 0
    try:
        for begin, other, length in given:
            ranges[count[0]] = IdRange(begin, other, length)
            count[0] += 1
    except BaseException:
        free(ranges)
        raise
    return ranges


cdef inline int read_ids(IdMap *into, object given) except -1:
    """`given`: None, or two tuples of (begin, other, count), for uids and gids. `free_ids` follows,
    also after a failure.
    """
    if given is not None:
        uids, gids = given
        into.uids = id_ranges(uids, &into.uid_count)
        into.gids = id_ranges(gids, &into.gid_count)
    return 0


cdef inline void free_ids(IdMap *ids) noexcept nogil:
    free(ids.uids)
    free(ids.gids)
    ids.uids = ids.gids = NULL


cdef inline bint map_id(const IdRange *ranges, size_t count, uint32_t *number) noexcept nogil:
    """Translate `number`. False, and it stays, if it has no mapping."""
    cdef size_t at
    for at in range(count):
        if number[0] - ranges[at].begin < ranges[at].count and number[0] >= ranges[at].begin:
            number[0] = ranges[at].other + (number[0] - ranges[at].begin)
            return True
    return False
