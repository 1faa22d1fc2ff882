//! Builds PVM's examples from Debian's copy of their sources, with our headers and libraries.

use crate::requirements::find_in_path;
use crate::run::run_successfully;
use anyhow::{Context, Result};
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// Time limit for one compilation on a loaded machine.
const COMPILE_TIMEOUT: Duration = Duration::from_secs(120);
/// Folder in which Debian's package installs the archives.
const ARCHIVE_FOLDER: &str = "/usr/share/doc/pvm-examples";
/// Names of the archives without `.tar.gz`. Each archive contains one folder.
const ARCHIVE_NAMES: [&str; 2] = ["examples", "gexamples"];

/// A program: name, source file, and further arguments of the compiler.
type ExampleProgram = (&'static str, &'static str, &'static [&'static str]);

/// Argument for the compiler: source file that all examples of the mailbox need in addition to
/// their own.
const MAILBOX_SOURCE: &[&str] = &["examples/taskf.c"];

/// All examples. Debian has no binaries of the last two, so the tests build these two but do not
/// run them.
const EXAMPLE_PROGRAMS: [ExampleProgram; 44] = [
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

/// Returns which requirement of the examples this machine does not meet; `None` if it meets all.
pub fn unmet_requirement() -> Option<String> {
    let missing_compiler = ["gcc", "gfortran"]
        .into_iter()
        .find(|name| find_in_path(name).is_none());
    if let Some(name) = missing_compiler {
        return Some(format!("{name} is missing: install {name}"));
    }
    let archives =
        ARCHIVE_NAMES.map(|name| Path::new(ARCHIVE_FOLDER).join(format!("{name}.tar.gz")));
    let missing_archive = archives.iter().find(|path| !path.exists());
    missing_archive.map(|path| format!("{} is missing: install pvm-examples", path.display()))
}

/// Extracts the sources of all examples into `folder`, which gets the folders `examples` and
/// `gexamples`, and a link to the headers under `prefix`.
pub fn extract_sources(prefix: &Path, folder: &Path) -> Result<()> {
    fs::create_dir_all(folder)?;
    for name in ARCHIVE_NAMES {
        let mut extract_command = Command::new("tar");
        extract_command
            .arg("-xzf")
            .arg(Path::new(ARCHIVE_FOLDER).join(format!("{name}.tar.gz")))
            .arg("-C")
            .arg(folder);
        run_successfully(extract_command, COMPILE_TIMEOUT)?;
    }
    // The Fortran sources search for the header next to their own folder.
    std::os::unix::fs::symlink(prefix.join("include"), folder.join("include"))?;
    Ok(())
}

/// Builds all examples into `folder`, with the headers and libraries under `prefix`.
pub fn build_all(prefix: &Path, folder: &Path) -> Result<()> {
    let sources = folder.join("sources");
    extract_sources(prefix, &sources)?;
    for (name, source, extra_arguments) in EXAMPLE_PROGRAMS {
        let is_fortran = source.ends_with(".f");
        let mut compile_command = Command::new(if is_fortran { "gfortran" } else { "gcc" });
        // These are Debian's options. They are needed because the sources do not declare the types
        // of functions, and some functions return nothing.
        compile_command
            .args([
                "-O2",
                "-w",
                "-g",
                "-fstack-protector-strong",
                "-D_FORTIFY_SOURCE=2",
            ])
            .args(if is_fortran {
                ["-fallow-argument-mismatch"]
            } else {
                ["-std=gnu89"]
            });
        compile_command
            .current_dir(&sources)
            .args(extra_arguments)
            .arg(source)
            .arg("-o")
            .arg(folder.join(name));
        // A Fortran compiler searches for a header with a relative name in the source's folder.
        compile_command
            .arg("-I")
            .arg(Path::new(source).parent().unwrap_or(Path::new(".")));
        compile_command
            .arg("-I")
            .arg(prefix.join("include"))
            .arg("-L")
            .arg(prefix.join("lib"));
        compile_command.args(is_fortran.then_some("-lfpvm3")).args([
            "-Wl,--as-needed",
            "-lgpvm3",
            "-lpvm3",
        ]);
        run_successfully(compile_command, COMPILE_TIMEOUT)
            .with_context(|| format!("building {name} from {source}"))?;
    }
    Ok(())
}
