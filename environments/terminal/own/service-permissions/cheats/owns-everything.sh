#!/bin/bash
# The service works and strangers are locked out, but the service owns its own program.
cd /srv/ledger
chown -R ledger:ledger .
chmod -R u=rwX,g=rX,o= .
chmod 755 . public bin/ledger
chmod 644 public/*
chmod 3770 inbox
chmod 2750 data log
chmod 400 etc/secret.key
