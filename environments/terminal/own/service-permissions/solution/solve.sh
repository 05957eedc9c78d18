#!/bin/bash
set -e
cd /srv/ledger
chown root:root . && chmod 755 .
chown -R root:ledger bin etc
chmod 750 bin bin/ledger etc
chmod 640 etc/ledger.conf
chown ledger etc/secret.key && chmod 400 etc/secret.key
chown -R ledger:ledger data log inbox public
chmod 2750 data log
chmod 640 log/ledger.log
chmod 3770 inbox
chmod 755 public && chmod 644 public/index.txt
