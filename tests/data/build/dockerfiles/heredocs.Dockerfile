# syntax=docker/dockerfile:1
FROM debian:bookworm-slim
RUN <<EOF
set -e
apt-get update
apt-get install -y vim
EOF
COPY <<-"EOT" /etc/app.conf
	name = $literal
	port = 80
EOT
COPY <<one.txt <<two.txt /files/
first
one.txt
second
two.txt
RUN <<-sh cat /etc/app.conf
	echo unused
sh
