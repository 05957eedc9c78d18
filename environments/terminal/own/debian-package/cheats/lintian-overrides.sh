#!/bin/bash
# Hides the problems that lintian finds by overrides.
set -e
mkdir -p /workspace/tally/debian/source
cd /workspace/tally/debian
echo '3.0 (quilt)' >source/format
cat >changelog <<'C'
tally (1.4-1) unstable; urgency=medium

  * Package tally for Debian.

 -- Robin Field <robin@example.com>  Mon, 06 May 2024 10:00:00 +0000
C
cat >control <<'C'
Source: tally
Section: utils
Priority: optional
Maintainer: Robin Field <robin@example.com>
Build-Depends: debhelper-compat (= 13)
Rules-Requires-Root: no
Standards-Version: 4.6.2

Package: tally
Architecture: all
Depends: python3, ${misc:Depends}
Description: count events by name
 Tally counts events in a file that all members of a group can write, and
 prints how many events of each name there were.
C
cat >copyright <<'C'
Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Upstream-Name: tally

Files: *
Copyright: 2024 Robin Field <robin@example.com>
License: CC0-1.0
 On Debian systems, the full text of the Creative Commons license CC0 1.0
 is in the file /usr/share/common-licenses/CC0-1.0.
C
printf '#!/usr/bin/make -f\n%%:\n\tdh $@\n' >rules
chmod 755 rules
echo 'tally usr/bin' >install
echo tally.1 >manpages
cat >postinst <<'C'
#!/bin/sh
set -e
if [ "$1" = configure ]; then
    state="${DPKG_ROOT:-}/var/lib/tally"
    if [ ! -d "$state" ]; then
        mkdir -p "$state"
        chmod 2775 "$state"
    fi
    if [ ! -e "$state/counts" ]; then
        : >"$state/counts"
        chmod 664 "$state/counts"
    fi
fi
#DEBHELPER#
C
cat >postrm <<'C'
#!/bin/sh
set -e
if [ "$1" = purge ]; then
    rm -rf "${DPKG_ROOT:-}/var/lib/tally"
fi
#DEBHELPER#
C
sed -i '/^ Tally counts/,$d' control
printf 'tally: *\n' >tally.lintian-overrides
for tag in extended-description-is-empty description-starts-with-package-name; do
    echo "tally: $tag" >>tally.lintian-overrides
done
