//! Builds PVM's examples from Debian's copy of their sources, with our headers and libraries.

use crate::requirements::find_in_path;
use crate::run::run_ok;
use anyhow::{Context, Result};
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// Time for one compilation on a loaded machine.
const COMPILE_TIMEOUT: Duration = Duration::from_secs(120);
/// Folder in which Debian's package installs the archives.
const ARCHIVE_FOLDER: &str = "/usr/share/doc/pvm-examples";
/// The archives; each contains one folder.
const ARCHIVES: [&str; 2] = ["examples", "gexamples"];

/// A program, as (name, source file, further arguments of the compiler).
type Program = (&'static str, &'static str, &'static [&'static str]);

/// Source file that all examples of the mailbox need in addition to their own.
const MAILBOX_SOURCE: &[&str] = &["examples/taskf.c"];

/// All examples. Debian has no binaries of the last two, so tests only build these two.
const PROGRAMS: [Program; 44] = [
    ("hello.pvm", "examples/hello.c", &[]),
    ("hello_other", "examples/hello_other.c", &[]),
    ("master1", "examples/master1.c", &[]),
    ("slave1", "examples/slave1.c", &[]),
    ("spmd", "examples/spmd.c", &[]),
    ("timing", "examples/timing.c", &[]),
    ("timing_slave", "examples/timing_slave.c", &[]),
    ("inherita", "examples/inherita.c", &[]),
    ("inheritb", "examples/inheritb.c", &[]),
    ("inherit1", "examples/inherit1.c", &[]),
    ("inherit2", "examples/inherit2.c", &[]),
    ("inherit3", "examples/inherit3.c", &[]),
    ("task0", "examples/task0.c", MAILBOX_SOURCE),
    ("task1", "examples/task1.c", MAILBOX_SOURCE),
    ("task_end", "examples/task_end.c", MAILBOX_SOURCE),
    ("rme", "examples/rme.c", MAILBOX_SOURCE),
    ("lmbi", "examples/lmbi.c", MAILBOX_SOURCE),
    ("gmbi", "examples/gmbi.c", MAILBOX_SOURCE),
    ("mhf_server", "examples/mhf_server.c", &[]),
    ("mhf_tickle", "examples/mhf_tickle.c", &[]),
    ("fmaster1", "examples/master1.f", &[]),
    ("fslave1", "examples/slave1.f", &[]),
    ("fspmd", "examples/spmd.f", &[]),
    ("hitc", "examples/hitc.f", &[]),
    ("hitc_slave", "examples/hitc_slave.f", &[]),
    ("gexample", "examples/gexample.c", &[]),
    ("fgexample", "examples/gexample.f", &[]),
    (
        "dbwtest",
        "examples/bwtest.c",
        &["-DPACK", "-DENCODE=PvmDataDefault"],
    ),
    (
        "ibwtest",
        "examples/bwtest.c",
        &["-DPACK", "-DENCODE=PvmDataInPlace"],
    ),
    (
        "rbwtest",
        "examples/bwtest.c",
        &["-DPACK", "-DENCODE=PvmDataRaw"],
    ),
    ("pbwtest", "examples/bwtest.c", &[]),
    ("joinleave", "gexamples/joinleave.c", &[]),
    ("tst", "gexamples/tst.c", &[]),
    ("gs.pvm", "gexamples/gs.c", &[]),
    ("ge", "gexamples/ge.c", &[]),
    ("gexamp", "gexamples/gexamp.c", &[]),
    ("thb", "gexamples/thb.c", &[]),
    ("tnb", "gexamples/tnb.c", &[]),
    ("tjl", "gexamples/tjl.c", &[]),
    ("tjf", "gexamples/tjf.c", &[]),
    ("trsg", "gexamples/trsg.c", &[]),
    ("frsg", "gexamples/frsg.f", &[]),
    ("mbox", "examples/mbox.c", &[]),
    ("ptest", "examples/ptest.c", &[]),
];

/// Returns why the examples cannot be built on this machine; `None` if they can.
pub fn lacks() -> Option<String> {
    let compiler = ["gcc", "gfortran"]
        .into_iter()
        .find(|name| find_in_path(name).is_none());
    if let Some(name) = compiler {
        return Some(format!("{name} is missing: install {name}"));
    }
    let archives = ARCHIVES.map(|name| Path::new(ARCHIVE_FOLDER).join(format!("{name}.tar.gz")));
    let missing = archives.iter().find(|path| !path.exists());
    missing.map(|path| format!("{} is missing: install pvm-examples", path.display()))
}

/// Builds all examples into `folder`, with the headers and libraries under `prefix`.
pub fn build(prefix: &Path, folder: &Path) -> Result<()> {
    let sources = folder.join("sources");
    fs::create_dir_all(&sources)?;
    for name in ARCHIVES {
        let mut tar = Command::new("tar");
        tar.arg("-xzf")
            .arg(Path::new(ARCHIVE_FOLDER).join(format!("{name}.tar.gz")))
            .arg("-C")
            .arg(&sources);
        run_ok(tar, COMPILE_TIMEOUT)?;
    }
    // The Fortran sources search for the header next to their own folder.
    std::os::unix::fs::symlink(prefix.join("include"), sources.join("include"))?;
    for (name, source, more) in PROGRAMS {
        let fortran = source.ends_with(".f");
        let mut compiler = Command::new(if fortran { "gfortran" } else { "gcc" });
        // These are Debian's options. The sources do not declare the types of functions, and some
        // functions return nothing.
        compiler
            .args([
                "-O2",
                "-w",
                "-g",
                "-fstack-protector-strong",
                "-D_FORTIFY_SOURCE=2",
            ])
            .args(if fortran {
                ["-fallow-argument-mismatch"]
            } else {
                ["-std=gnu89"]
            });
        compiler
            .current_dir(&sources)
            .args(more)
            .arg(source)
            .arg("-o")
            .arg(folder.join(name));
        // Fortran compilers resolve relative names of headers from the source's folder.
        compiler
            .arg("-I")
            .arg(Path::new(source).parent().unwrap_or(Path::new(".")));
        compiler
            .arg("-I")
            .arg(prefix.join("include"))
            .arg("-L")
            .arg(prefix.join("lib"));
        compiler
            .args(fortran.then_some("-lfpvm3"))
            .args(["-Wl,--as-needed", "-lgpvm3", "-lpvm3"]);
        run_ok(compiler, COMPILE_TIMEOUT)
            .with_context(|| format!("building {name} from {source}"))?;
    }
    Ok(())
}
