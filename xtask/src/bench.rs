//! `cargo xtask bench`: the wire format alone, and the running system.

use crate::install;
use anyhow::{Result, bail};
use sempa_tests::run::run as run_to_end;
use sempa_tests::vm::Settings;
use sempa_tests::{Testbed, Vm, needs, programs};
use std::time::Duration;

const SYSTEM_TIME: Duration = Duration::from_secs(300);

/// `micro`, `system` or `all`.
///
/// # Errors
/// A build fails, or the system cannot be started.
pub(crate) fn run(what: &str) -> Result<bool> {
    let mut good = true;
    if what != "system" {
        good &= install::cargo(&["bench", "-p", "sempa-benches"])?.status()?.success();
    }
    if what != "micro" {
        good &= system()?;
    }
    Ok(good)
}

/// Round trips and throughput between two tasks, on one host and on two.
fn system() -> Result<bool> {
    if let Some(lack) = needs::lacks() {
        bail!("bench system: {lack}");
    }
    install::build(false)?;
    let prefix = install::target()?.join("sempa-prefix");
    install::lay_out(&prefix)?;
    let prefix = prefix.canonicalize()?;
    let bed = Testbed::new(2, Some(&prefix), &[])?;
    let vm = Vm::start(&bed, Settings::default())?;
    vm.add(&["h2"])?;
    let program = programs::compile("pingpong", &prefix, &vm.home().join("pvm3/bin/LINUX64"))?;
    let mut good = true;
    for (place, host) in [("on one host", "h1"), ("between two hosts", "h2")] {
        println!("bench: {place}");
        let mut command = vm.command(bed.host(1), &program);
        command.arg(host);
        let done = run_to_end(command, SYSTEM_TIME)?;
        print!("{}{}", done.out, done.err);
        good &= done.good();
    }
    vm.halt()?;
    Ok(good)
}
