//! The part of the demo that needs no testbed: a virtual machine that consists only of this host
//! and runs a PVM program.

use crate::demo_output::print_demo_line;
use anyhow::{Context, Result, bail};
use sempa_tests::programs;
use sempa_tests::run::{CommandResult, run as run_to_end};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

const WAIT_TIMEOUT: Duration = Duration::from_secs(60);
/// Path of one of Debian's examples. If it is not installed, a program of the tests is run instead.
const EXAMPLE_PROGRAM: &str = "/usr/bin/master1";

/// Starts, uses and halts a virtual machine whose files are in a temporary folder. Returns false if
/// a check fails.
///
/// # Errors
/// A program cannot be started.
pub(crate) fn run(prefix: &Path) -> Result<bool> {
    let folder = tempfile_folder()?;
    let command = |program: &Path| {
        let mut command = Command::new(program);
        command
            .env("PVM_TMP", &folder)
            .env("LD_LIBRARY_PATH", prefix.join("lib"))
            .current_dir(&folder);
        // The daemon searches the folders in PVM_PATH for programs to spawn.
        command
            .env("PVM_PATH", "/usr/bin")
            .env("PVM_ALLOW_ROOT", "1");
        command.env(
            "PATH",
            format!("{}:/usr/bin:/bin", prefix.join("bin").display()),
        );
        command
    };
    let pvm = |words: &[&str]| -> Result<CommandResult> {
        let mut command = command(&prefix.join("bin/pvm"));
        command.args(words);
        run_to_end(command, WAIT_TIMEOUT)
    };
    let good = (|| -> Result<bool> {
        pvm(&["start"])?.expect_success("starting the virtual machine")?;
        print_demo_line("the virtual machine runs on this host");
        let done = if Path::new(EXAMPLE_PROGRAM).exists() {
            print_demo_line("Debian's example master1, as it is, and its slaves:");
            run_to_end(command(Path::new(EXAMPLE_PROGRAM)), WAIT_TIMEOUT)?
        } else {
            print_demo_line(
                "a small program of our own, because Debian's pvm-examples is not installed:",
            );
            let mut own = command(&programs::compile("pingpong", prefix, &folder)?);
            own.arg(name_of_this_host(&pvm(&["--json", "conf"])?)?);
            run_to_end(own, WAIT_TIMEOUT)?
        };
        print!("{}{}", done.out, done.err);
        Ok(done.succeeded())
    })();
    let halted = pvm(&["halt"]);
    let removed = std::fs::remove_dir_all(&folder);
    let good = good?;
    if !halted?.succeeded() {
        bail!("the virtual machine does not halt");
    }
    removed.with_context(|| folder.display().to_string())?;
    print_demo_line(if good {
        "what can be shown on one host held"
    } else {
        "NOT GOOD: the example failed"
    });
    Ok(good)
}

fn name_of_this_host(conf: &CommandResult) -> Result<String> {
    let value: serde_json::Value =
        serde_json::from_str(conf.out.trim()).context("pvm --json conf")?;
    Ok(value["hosts"][0]["name"]
        .as_str()
        .context("conf names the hosts")?
        .to_string())
}

fn tempfile_folder() -> Result<std::path::PathBuf> {
    let folder = std::env::temp_dir().join(format!("sempa-demo-{}", std::process::id()));
    std::fs::create_dir(&folder).with_context(|| folder.display().to_string())?;
    Ok(folder)
}
