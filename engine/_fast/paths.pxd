# Names in archives, for their readers. Functions are inline: there is no paths.pyx.

from libc.string cimport memcpy


cdef inline ssize_t clean(const char *raw, char *path) noexcept nogil:
    """Write `raw` to `path` as a relative name without empty parts, `.` and `..`.

    Returns the length, or -1 if it leads above the root. `path` has room for all of `raw`.
    """
    cdef ssize_t length = 0, part
    cdef const char *at = raw
    while at[0]:
        if at[0] == b"/":
            at += 1
            continue
        part = 0
        while at[part] and at[part] != b"/":
            part += 1
        if part == 1 and at[0] == b".":
            pass
        elif part == 2 and at[0] == b"." and at[1] == b".":
            if length == 0:
                return -1
            while length and path[length - 1] != b"/":
                length -= 1
            if length:
                length -= 1
        else:
            if length:
                path[length] = b"/"
                length += 1
            memcpy(path + length, at, part)
            length += part
        at += part
    path[length] = 0
    return length
