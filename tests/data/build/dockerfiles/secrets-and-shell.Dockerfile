FROM alpine:3.20
SHELL ["/bin/sh", "-eo", "pipefail", "-c"]
RUN --mount=type=secret,id=token,required=false test ! -f /run/secrets/token && echo no token
RUN --network=none echo offline
RUN --mount=type=tmpfs,target=/scratch touch /scratch/x && ls /scratch
RUN ["/bin/echo", "exec", "form"]
