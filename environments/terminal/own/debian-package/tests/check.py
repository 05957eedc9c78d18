"""Builds the package from a copy with a changed program, and looks at it, at its scripts and at lintian's opinion."""

import stat

from harness import WORK, as_agent, copy_work, private_folder, require, run, write


def call(*argv, cwd, timeout_s=40.0, env=None):
    result = run(argv, cwd=cwd, timeout_s=timeout_s, env=env)
    require(result.returncode == 0, f"{argv[0]} failed: {(result.stdout + result.stderr)[-1500:]}")
    return result.stdout


def modes(folder):
    """Return the modes of all files and folders below a folder, by their paths."""
    with as_agent():
        return {str(path.relative_to(folder)): stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*")}


def verify():
    folder = private_folder()
    with as_agent():
        original = (WORK / "tally/tally").read_text()
    copy_work(folder / "tally", WORK / "tally")
    changed = original.replace("print(count, name)", 'print(f"{name}: {count}")')
    require(original != changed, "the program was changed")
    write(folder / "tally/tally", changed, mode=0o755)
    call("dpkg-buildpackage", "-us", "-uc", "-b", "-d", cwd=folder / "tally")
    call("dpkg-deb", "--raw-extract", "tally_1.4-1_all.deb", "got", cwd=folder)
    fields = call("dpkg-deb", "--field", "tally_1.4-1_all.deb", cwd=folder)
    for line in ("Package: tally", "Version: 1.4-1", "Architecture: all", "Section: utils"):
        require(line in fields.splitlines(), f"the package lacks {line!r}")
    require("Maintainer: Robin Field <robin@example.com>" in fields, "the package has another maintainer")
    depends = next((line for line in fields.splitlines() if line.startswith("Depends:")), "")
    require("python3" in depends, f"the package does not depend on python3: {depends}")

    found = modes(folder / "got")
    for path, mode in (
        ("usr/bin/tally", 0o755),
        ("usr/share/man/man1/tally.1.gz", 0o644),
        ("usr/share/doc/tally/copyright", 0o644),
        ("usr/share/doc/tally/changelog.Debian.gz", 0o644),
    ):
        require(found.get(path) == mode, f"{path} is missing, or has another mode than {mode:o}")
    with as_agent():
        require((folder / "got/usr/bin/tally").read_text() == changed, "the package has an old version of the program")
        require("CC0-1.0" in (folder / "got/usr/share/doc/tally/copyright").read_text(), "copyright lacks the license")

    for number in range(2):
        root = folder / f"root{number}"
        state = root / "var/lib/tally"
        write(root / "var/lib/other", "stays")

        def script(name, argument, root=root):
            call(folder / "got/DEBIAN" / name, argument, cwd="/", env={"DPKG_ROOT": str(root)})

        if number:
            write(state / "counts", "one\n", mode=0o600)
        script("postinst", "configure")
        wanted = {"": 0o2775, "counts": 0o600 if number else 0o664}
        with as_agent():
            found = {name: stat.S_IMODE((state / name).stat().st_mode) for name in wanted}
            require(number or found == wanted, f"postinst makes {found}")
            require(found["counts"] == wanted["counts"], "postinst changes the mode of counts")
            require((state / "counts").read_text() == "one\n" * number, "postinst changes counts")
        env = {"TALLY_FILE": str(state / "counts")}
        call(folder / "got/usr/bin/tally", "add", "two", cwd="/", env=env)
        shown = call(folder / "got/usr/bin/tally", "show", cwd="/", env=env)
        require(shown == "one: 1\n" * number + "two: 1\n", f"tally shows {shown!r}")
        script("postrm", "remove")
        require("var/lib/tally/counts" in modes(root), "postrm remove deletes counts")
        script("postrm", "purge")
        require(sorted(modes(root)) == ["var", "var/lib", "var/lib/other"], f"purge leaves {sorted(modes(root))}")

    result = run(
        ["lintian", "--no-cfg", "--no-override", "--tag-display-limit", "0", "tally_1.4-1_all.deb"],
        cwd=folder,
        timeout_s=40,
    )
    problems = [line for line in result.stdout.splitlines() if line[:2] in ("E:", "W:")]
    problems = [line for line in problems if "initial-upload-closes-no-bugs" not in line]
    require(result.returncode in (0, 2) and not problems, f"lintian: {problems} {result.stderr[-500:]}")
