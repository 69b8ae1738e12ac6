FROM php:8.3-apache
RUN set -eu; \
	apt-get update; \
	apt-get install -y --no-install-recommends ghostscript;
RUN set -e; \
	savedAptMark="$(echo manual)"; \
	docker-php-ext-install -j "$(nproc)" gd mysqli zip
RUN { \
		echo 'opcache.memory_consumption=128'; \
		echo 'opcache.revalidate_freq=2'; \
	} > /usr/local/opcache.ini
VOLUME /var/www/html
COPY --chown=nobody:nobody public/ /usr/src/wordpress/
COPY docker-entrypoint.sh /usr/local/bin/
ENTRYPOINT ["docker-entrypoint.sh"]
CMD ["apache2-foreground"]
