FROM debian:bookworm-slim
RUN groupadd -r -g 999 redis && useradd -r -g redis -u 999 redis
ENV REDIS_VERSION 7.4.1
ENV REDIS_DOWNLOAD_SHA 6ce4b5f4dc8d0a1f
RUN set -eu; \
    savedAptMark="none"; \
    apt-get install -y --no-install-recommends gcc make; \
    echo "$REDIS_DOWNLOAD_SHA *redis.tar.gz"; \
    make -C /usr/src/redis -j "$(echo 2)"
RUN mkdir /data
VOLUME /data
WORKDIR /data
COPY docker-entrypoint.sh /usr/local/bin/
ENTRYPOINT ["docker-entrypoint.sh"]
EXPOSE 6379
CMD ["redis-server"]
