ARG VERSION=1.2.3
FROM alpine:3.20
ARG VERSION
ARG PREFIX=/usr/local
ENV APP_VERSION=$VERSION \
    APP_HOME=${PREFIX}/app \
    PATH=${PREFIX}/app/bin:$PATH
LABEL org.opencontainers.image.version=$VERSION \
      org.opencontainers.image.title="An app"
WORKDIR $APP_HOME
RUN echo "$APP_VERSION" >version && echo "$PATH"
STOPSIGNAL SIGQUIT
HEALTHCHECK --interval=30s --timeout=3s CMD test -f version || exit 1
VOLUME /data
EXPOSE 80/tcp 53/udp
