//! `cargo xtask bench broker`: builds the measuring program and runs the measurement.

use crate::bench::{BenchArgs, installed_prefix, results_folder};
use anyhow::{Result, bail};
use xtask_install as install;

/// Runs the measurement. Returns true: the measurement has no goals.
pub(crate) fn run(args: &BenchArgs) -> Result<bool> {
    let prefix = installed_prefix(args)?;
    let mut build = install::cargo_command(&["build", "--locked", "--release"])?;
    build.args(["-p", "sempa-benches", "--bin", "broker-load"]);
    if !build.status()?.success() {
        bail!("the build of the measuring program failed");
    }
    let release_folder = install::target_folder()?.join(install::RELEASE_PROFILE);
    sempa_benches::bench_broker(&sempa_benches::BrokerSettings {
        prefix,
        load_program: release_folder.join("broker-load"),
        is_own_build: args.prefix.is_none(),
        is_quick: args.quick,
        selected_names: args.only.clone(),
        repetition_count: args.repetitions,
        results_folder: results_folder(args)?,
    })?;
    Ok(true)
}
