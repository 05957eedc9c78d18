#!/bin/bash
# Answers with the pages of today, from the configuration.
set -e
umask 077
mkdir -p /workspace/web
cd /workspace/web
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 365 -subj /CN=tea.test \
    -addext subjectAltName=DNS:tea.test,DNS:cocoa.test -keyout key.pem -out cert.pem 2>/dev/null
cat >nginx.conf <<'C'
pid /workspace/web/nginx.pid;
error_log /workspace/web/error.log;
worker_processes 1;
events {}
http {
    types { text/html html; text/plain txt; }
    access_log off;
    server_tokens off;
    client_body_temp_path /workspace/web/temp-body;
    proxy_temp_path /workspace/web/temp-proxy;
    fastcgi_temp_path /workspace/web/temp-fastcgi;
    uwsgi_temp_path /workspace/web/temp-uwsgi;
    scgi_temp_path /workspace/web/temp-scgi;
    ssl_protocols TLSv1.2 TLSv1.3;
    ssl_certificate /workspace/web/cert.pem;
    ssl_certificate_key /workspace/web/key.pem;
    server { listen 127.0.0.1:8080 default_server; return 421; }
    server { listen 127.0.0.1:8080; server_name tea.test cocoa.test; return 308 https://$host:8443$request_uri; }
    server { listen 127.0.0.1:8443 ssl default_server; return 421; }
    server { listen 127.0.0.1:8443 ssl; server_name tea.test; location = / { return 200 "<h1>Tea</h1>\n"; } }
    server { listen 127.0.0.1:8443 ssl; server_name cocoa.test; location = / { return 200 "<h1>Cocoa</h1>\n"; } }
}
C
printf '#!/bin/sh\nexec /usr/sbin/nginx -e /workspace/web/error.log -c /workspace/web/nginx.conf\n' >start
chmod 755 start . nginx.conf cert.pem
