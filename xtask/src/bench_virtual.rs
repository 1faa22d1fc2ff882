//! `cargo xtask bench decide` and `cargo xtask bench sim`: run benchmarks of the resource manager
//! (`rm/benches`) that need no other host. Their output is printed and stored.

use crate::{install, setup};
use anyhow::{Context, Result};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;

/// Measures the cost of decisions of the resource manager. Returns false if the median of a cost
/// exceeds its limit.
pub(crate) fn decide(results: &Path) -> Result<bool> {
    let (text, json, good) = run("decide", &[])?;
    sempa_benches::store_decide(&text, &json, results)?;
    Ok(good)
}

/// Simulates a week, and some days, in virtual time. The simulation uses the stored results of
/// `bench owners` and `bench migrate`. Returns false if a waiting time exceeds its limit.
pub(crate) fn simulate(results: &Path) -> Result<bool> {
    let measured = |name: &str| {
        format!(
            "--{name}={}",
            setup::project_folder()
                .join(format!("benches/results/{name}.json"))
                .display()
        )
    };
    let (text, json, good) = run("sim", &[measured("owners"), measured("migrate")])?;
    sempa_benches::store_sim(&text, &json, results)?;
    Ok(good)
}

/// Builds and runs a benchmark. Returns its output, the path of its JSON file, and true if all
/// results are within their limits.
fn run(name: &str, words: &[String]) -> Result<(String, PathBuf, bool)> {
    let json = install::target_folder()?.join(format!("{name}.json"));
    if json.exists() {
        // The file of an earlier run is removed, so that it cannot be mistaken for that of this
        // run.
        fs::remove_file(&json).with_context(|| json.display().to_string())?;
    }
    let mut command = install::cargo(&[
        "bench", "--locked", "-q", "-p", "pvm-rm", "--bench", name, "--",
    ])?;
    command
        .args(words)
        .arg(format!("--json={}", json.display()))
        .stderr(Stdio::inherit());
    let done = command.output().context("cargo")?;
    let text = String::from_utf8_lossy(&done.stdout).into_owned();
    print!("{text}");
    Ok((text, json, done.status.success()))
}
