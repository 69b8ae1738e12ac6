FROM alpine:3.20 AS good
RUN echo fine
FROM alpine:3.20
RUN echo before
RUN echo "cannot do it" >&2; exit 3
RUN echo after
