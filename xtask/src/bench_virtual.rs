//! `cargo xtask bench decide` and `cargo xtask bench sim`: run benchmarks of the resource manager
//! (`rm/benches`) that need no other host. The output of the benchmarks is printed and stored.

use anyhow::{Context, Result};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use xtask_install as install;

/// Measures the cost of decisions of the resource manager. Returns false if the median of a cost
/// exceeds its limit.
pub(crate) fn measure_decisions(results_folder: &Path) -> Result<bool> {
    let (text, json_file, is_within_limits) = run_benchmark("decide", &[])?;
    sempa_benches::store_decide(&text, &json_file, results_folder)?;
    Ok(is_within_limits)
}

/// Simulates a week of many desktops, and some days with one dominant user, in virtual time. The
/// simulation uses the stored results of `bench owners` and `bench migrate`. Returns false if a
/// waiting time exceeds its limit.
pub(crate) fn simulate_days(results_folder: &Path) -> Result<bool> {
    let results_option = |name: &str| {
        format!(
            "--{name}={}",
            xtask_install::project_folder()
                .join(format!("benches/results/{name}.json"))
                .display()
        )
    };
    let (text, json_file, is_within_limits) = run_benchmark(
        "sim",
        &[results_option("owners"), results_option("migrate")],
    )?;
    sempa_benches::store_sim(&text, &json_file, results_folder)?;
    Ok(is_within_limits)
}

/// Builds the benchmark `name` and runs it with the arguments `arguments`. Returns the output of
/// the benchmark, the path of its JSON file, and true if all results are within their limits.
fn run_benchmark(name: &str, arguments: &[String]) -> Result<(String, PathBuf, bool)> {
    let json_path = install::target_folder()?.join(format!("{name}.json"));
    if json_path.exists() {
        // The JSON file of an earlier run is removed, so that it cannot be mistaken for the file of
        // this run.
        fs::remove_file(&json_path).with_context(|| json_path.display().to_string())?;
    }
    let mut command = install::cargo_command(&[
        "bench", "--locked", "-q", "-p", "pvm-rm", "--bench", name, "--",
    ])?;
    command
        .args(arguments)
        .arg(format!("--json={}", json_path.display()))
        .stderr(Stdio::inherit());
    let cargo_output = command.output().context("cargo")?;
    let text = String::from_utf8_lossy(&cargo_output.stdout).into_owned();
    print!("{text}");
    Ok((text, json_path, cargo_output.status.success()))
}
