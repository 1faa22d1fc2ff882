//! A demo without a testbed: a virtual machine that consists only of this host and runs a PVM
//! program.

use crate::demo_output::print_demo_line;
use anyhow::{Context, Result, bail};
use sempa_tests::programs;
use sempa_tests::run::{CommandResult, run_to_end};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// Time limit for each command of the demo.
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);
/// Path of one of Debian's examples. If the example is not installed, a program of the tests is run
/// instead.
const EXAMPLE_PROGRAM: &str = "/usr/bin/master1";

/// Starts, uses and halts a virtual machine whose files are in a temporary folder. `prefix` is the
/// folder with the installed programs. Returns false if a check fails.
///
/// # Errors
/// A program cannot be started.
pub(crate) fn run(prefix: &Path) -> Result<bool> {
    let folder = create_temporary_folder()?;
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
    let run_pvm = |arguments: &[&str]| -> Result<CommandResult> {
        let mut command = command(&prefix.join("bin/pvm"));
        command.args(arguments);
        run_to_end(command, WAIT_TIMEOUT)
    };
    let run_result = (|| -> Result<bool> {
        run_pvm(&["start"])?.expect_success("starting the virtual machine")?;
        print_demo_line("the virtual machine runs on this host");
        let program_result = if Path::new(EXAMPLE_PROGRAM).exists() {
            print_demo_line("Debian's example master1, as it is, and its slaves:");
            run_to_end(command(Path::new(EXAMPLE_PROGRAM)), WAIT_TIMEOUT)?
        } else {
            print_demo_line(
                "a small program of our own, because Debian's pvm-examples is not installed:",
            );
            let mut pingpong_command =
                command(&programs::compile_into("pingpong", prefix, &folder)?);
            pingpong_command.arg(first_host_name(&run_pvm(&["--json", "conf"])?)?);
            run_to_end(pingpong_command, WAIT_TIMEOUT)?
        };
        print!("{}{}", program_result.stdout, program_result.stderr);
        Ok(program_result.succeeded())
    })();
    let halt_result = run_pvm(&["halt"]);
    let removal_result = std::fs::remove_dir_all(&folder);
    let run_result = run_result?;
    if !halt_result?.succeeded() {
        bail!("the virtual machine does not halt");
    }
    removal_result.with_context(|| folder.display().to_string())?;
    print_demo_line(if run_result {
        "what can be shown on one host held"
    } else {
        "NOT GOOD: the example failed"
    });
    Ok(run_result)
}

fn first_host_name(conf_result: &CommandResult) -> Result<String> {
    let configuration: serde_json::Value =
        serde_json::from_str(conf_result.stdout.trim()).context("pvm --json conf")?;
    Ok(configuration["hosts"][0]["name"]
        .as_str()
        .context("conf names the hosts")?
        .to_string())
}

fn create_temporary_folder() -> Result<std::path::PathBuf> {
    let folder = std::env::temp_dir().join(format!("sempa-demo-{}", std::process::id()));
    std::fs::create_dir(&folder).with_context(|| folder.display().to_string())?;
    Ok(folder)
}
