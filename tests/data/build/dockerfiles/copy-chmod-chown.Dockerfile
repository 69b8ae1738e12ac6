FROM alpine:3.20
COPY --chown=nobody:nobody --chmod=0755 docker-entrypoint.sh /entrypoint
COPY --chown=1000:1000 public/ /www/
ADD conf.d /etc/conf.d
USER nobody
ENTRYPOINT ["/entrypoint"]
