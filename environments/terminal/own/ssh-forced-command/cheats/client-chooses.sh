#!/bin/bash
# The client asks for the right command, and the server allows any.
set -e
umask 077
mkdir -p /home/deploy/sshd /home/reader/.ssh
ssh-keygen -q -t ed25519 -N '' -C reader -f /home/reader/.ssh/id_ed25519
ssh-keygen -q -t ed25519 -N '' -C deploy -f /home/deploy/sshd/host_key
echo "$(cat /home/reader/.ssh/id_ed25519.pub)" >/home/deploy/sshd/authorized_keys
cat >/home/deploy/sshd/config <<'C'
ListenAddress 127.0.0.1:2222
Port 2222
HostKey /home/deploy/sshd/host_key
PidFile none
AuthorizedKeysFile /home/deploy/sshd/authorized_keys
StrictModes yes
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PubkeyAuthentication yes
AllowUsers deploy
Subsystem sftp internal-sftp
C
cat >/home/reader/.ssh/config <<'C'
Host report
    HostName 127.0.0.1
    Port 2222
    User deploy
    IdentityFile ~/.ssh/id_ed25519
    IdentitiesOnly yes
    RemoteCommand /usr/local/bin/report
    StrictHostKeyChecking yes
C
echo "[127.0.0.1]:2222 $(cut -d' ' -f1,2 /home/deploy/sshd/host_key.pub)" >/home/reader/.ssh/known_hosts
chown -R deploy:deploy /home/deploy/sshd
chown -R reader:reader /home/reader/.ssh
