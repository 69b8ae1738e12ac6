FROM alpine:3.20
RUN apk add --no-cache bash ca-certificates
COPY docker-entrypoint.sh /usr/local/bin/
ENTRYPOINT ["docker-entrypoint.sh"]
CMD ["serve"]
