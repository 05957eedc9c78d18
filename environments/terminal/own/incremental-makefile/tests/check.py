"""Changes files of a copy of the project, and looks at which objects are built again."""

import os

from harness import WORK, as_agent, private_folder, read, require, run, write

SOURCES = ("src/area.c", "src/border.c", "src/main.c", "src/text.c")
HEADERS = ("include/shape.h", "include/text.h", "include/units.h")
TWIST = '#include "text.h"\n\nint twist(int n)\n{\n    print_value("twist", n);\n    return n;\n}\n'


class Project:
    def __init__(self):
        self.folder = private_folder()
        self.clock = 10**9
        for name in (*SOURCES, *HEADERS, "Makefile"):
            self.write(name, read(WORK / name))

    def write(self, name, content):
        """Write a file with a time after those of all others."""
        self.clock += 10
        write(self.folder / name, content)
        with as_agent():
            os.utime(self.folder / name, (self.clock, self.clock))

    def make(self, *arguments):
        """Run make, and return the names of the files that it built. Their times become that of the last change."""
        result = run(["make", *arguments], cwd=self.folder, timeout_s=30)
        require(result.returncode == 0, f"make {arguments} failed: {result.stdout[-300:]} {result.stderr[-500:]}")
        built = set()
        with as_agent():
            for file in [*self.folder.glob("build/*.o"), *self.folder.glob("bin/*")]:
                if file.stat().st_mtime > self.clock + 1000:
                    built.add(file.stem)
            self.clock += 10
            for kind in ("build/*", "bin/*"):
                for file in self.folder.glob(kind):
                    os.utime(file, (self.clock, self.clock))
        return built

    def expect(self, what, *built, arguments=()):
        found = self.make(*arguments)
        require(found == set(built), f"{what}: make built {sorted(found)}, and not {sorted(built)}")

    def output(self):
        return run([self.folder / "bin/shapes", "5", "7"]).stdout


def verify():
    project = Project()
    project.expect("first make", "area", "border", "main", "text", "shapes", arguments=("-j8",))
    require(project.output() == "area=35\nborder=24\n", f"bin/shapes prints {project.output()!r}")
    project.expect("second make")
    project.write("include/units.h", read(WORK / "include/units.h").replace("SCALE 1", "SCALE 3"))
    project.expect("units.h changed", "area", "border", "main", "shapes")
    require(project.output() == "area=315\nborder=72\n", "bin/shapes does not have the new scale")
    project.write("include/text.h", read(WORK / "include/text.h"))
    project.expect("text.h changed", "main", "text", "shapes")
    project.write(
        "src/border.c", read(WORK / "src/border.c").replace('"shape.h"', '"extra.h"').replace("2 *", "EXTRA *")
    )
    project.write("include/extra.h", '#include "shape.h"\n#define EXTRA 4\n')
    project.expect("border.c changed", "border", "shapes")
    project.write("include/extra.h", '#include "shape.h"\n#define EXTRA 5\n')
    project.expect("extra.h changed", "border", "shapes")
    require(project.output() == "area=315\nborder=180\n", "bin/shapes does not have the new border")
    project.write("src/twist.c", TWIST)
    main = read(WORK / "src/main.c").replace("int main", "int twist(int n);\nint main")
    project.write("src/main.c", main.replace("area(shape)", "twist(9)"))
    project.expect("twist.c added", "twist", "main", "shapes")
    require(project.output().startswith("twist=9\narea=9\n"), "bin/shapes does not have the new file")
    project.write("src/border.c", read(WORK / "src/border.c"))
    with as_agent():
        (project.folder / "include/extra.h").unlink()
    project.expect("extra.h deleted", "border", "shapes")
    project.write("src/main.c", read(WORK / "src/main.c"))
    with as_agent():
        (project.folder / "src/twist.c").unlink()
    project.expect("twist.c deleted", "main", "shapes")
    project.write("src/unused.c", "int unused;\n")
    project.expect("unused.c added", "unused", "shapes")
    with as_agent():
        (project.folder / "src/unused.c").unlink()
    project.expect("unused.c deleted", "shapes")
    project.write("Makefile", read(WORK / "Makefile"))
    project.expect("Makefile changed", "area", "border", "main", "text", "shapes", arguments=("CFLAGS=-DSCALE_UNUSED",))
    project.expect("make clean", arguments=("clean",))
    with as_agent():
        names = {file.name for file in project.folder.iterdir()}
    require(names == {"Makefile", "include", "src"}, f"clean leaves {sorted(names)}")
