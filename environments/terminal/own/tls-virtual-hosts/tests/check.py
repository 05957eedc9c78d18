"""Starts the server, and sends requests for pages that the agent has not seen."""

import contextlib
import secrets
import socket
import time

from harness import WORK, as_agent, read, require, run, start, write

WEB = WORK / "web"
HOSTS = ("tea.test", "cocoa.test", "milk.test")


def curl(url, *arguments):
    """Return the status, the target of a redirection, and the response with its header."""
    known = [word for host in HOSTS for port in (8080, 8443) for word in ("--resolve", f"{host}:{port}:127.0.0.1")]
    form = "\n%{http_code} %{redirect_url}"
    result = run(["curl", "-qsi", "-m", "5", "--path-as-is", *known, "-w", form, *arguments, url])
    text, _, last = result.stdout.rpartition("\n")
    status, _, target = last.partition(" ")
    return int(status), target, text


def openssl(*arguments, stdin=""):
    result = run(["openssl", *arguments], stdin=stdin)
    return result.stdout


def listens(port):
    """Wait until a server accepts connections; return whether it does."""
    for _ in range(50):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
            return True
        time.sleep(0.1)
    return False


def verify():
    start([WEB / "start"])
    for port in (8080, 8443):
        require(listens(port), f"nothing listens on port {port} 5 s after the start")
    trust = ("--cacert", str(WEB / "cert.pem"))
    page = secrets.token_hex(8)
    write(WORK / "sites/tea/new/page.txt", page)
    for name in ("tea", "cocoa"):
        status, _, text = curl(f"https://{name}.test:8443/", *trust)
        require(
            status == 200 and text.endswith(read(WORK / f"sites/{name}/index.html")), f"{name}.test: {status} {text}"
        )
        require("nginx/" not in text, "the version of nginx is in the response")
    require(curl("https://tea.test:8443/new/page.txt", *trust)[2].endswith(page), "a new file is not served")
    require(curl("https://cocoa.test:8443/new/page.txt", *trust)[0] == 404, "cocoa.test serves a file of tea.test")
    require(curl("https://tea.test:8443/new/", *trust)[0] == 403, "a folder without an index does not give 403")
    require(curl("https://milk.test:8443/", "-k")[0] == 421, "milk.test does not give 421 over HTTPS")
    require(curl("https://127.0.0.1:8443/", "-k")[0] == 421, "a request without SNI does not give 421")
    require(curl("https://tea.test:8443/", "-k", "-H", "Host: milk.test")[0] == 421, "another host does not give 421")
    require(curl("http://milk.test:8080/")[0] == 421, "milk.test does not give 421 over HTTP")
    require(curl("http://127.0.0.1:8080/x")[0] == 421, "127.0.0.1 does not give 421 over HTTP")
    for host in HOSTS[:2]:
        status, target, _ = curl(f"http://{host}:8080/a/b?x={page}&y=%20")
        wanted = f"https://{host}:8443/a/b?x={page}&y=%20"
        require((status, target) == (308, wanted), f"HTTP of {host}: {status} {target}")
    old = openssl("s_client", "-connect", "127.0.0.1:8443", "-tls1_1", "-cipher", "ALL:@SECLEVEL=0")
    require("no peer certificate" in old, "TLS 1.1 works")

    certificate = openssl("x509", "-in", str(WEB / "cert.pem"), "-noout", "-text", "-ext", "subjectAltName")
    require("prime256v1" in certificate, "the key is not on P-256")
    names = sorted(word.strip(" ,") for word in certificate.splitlines()[-1].replace("DNS:", " ").split())
    require(names == ["cocoa.test", "tea.test"], f"the names are {names}")
    lasting = openssl("x509", "-in", str(WEB / "cert.pem"), "-noout", "-checkend", str(89 * 86400))
    require("will not expire" in lasting, "the certificate is not valid for 90 days")
    with as_agent():
        require((WEB / "key.pem").stat().st_mode & 0o077 == 0, "others can read key.pem")
    rows = [line.split() for line in read("/proc/net/tcp").splitlines() + read("/proc/net/tcp6").splitlines()]
    listening = {row[1] for row in rows if row[3] == "0A" and row[1].endswith((":1F90", ":20FB"))}
    require(listening == {"0100007F:1F90", "0100007F:20FB"}, f"sockets that listen: {sorted(listening)}")
