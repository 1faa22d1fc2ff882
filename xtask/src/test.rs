//! `cargo xtask test`: set up, build once, install, run every test.

use crate::{install, setup};
use anyhow::Result;
use sempa_tests::needs;
use std::process::{Command, Stdio};
use std::time::Instant;

/// Runs all tests; `words` go to the test runner.
///
/// # Errors
/// Set-up or build failed. Failing tests are the return value: `false`.
pub(crate) fn run(words: &[String]) -> Result<bool> {
    let start = Instant::now();
    setup::everything()?;
    install::build(true)?;
    let prefix = install::target()?.join("sempa-prefix");
    install::lay_out(&prefix)?;
    println!(
        "test: programs are in {}; set-up and build took {} s",
        prefix.display(),
        start.elapsed().as_secs()
    );
    let lack = needs::lacks();
    if let Some(lack) = &lack {
        println!("test: {lack}; the tests that need hosts will fail");
    }
    let nextest = Command::new("cargo")
        .args(["nextest", "--version"])
        .output()
        .is_ok_and(|done| done.status.success());
    let begun = Instant::now();
    let mut good = !words.is_empty() || lints()?;
    let mut runs: Vec<&[&str]> = Vec::new();
    if nextest {
        runs.push(&[
            "nextest",
            "run",
            "--release",
            "--workspace",
            "--no-fail-fast",
            "--run-ignored",
            "all",
        ]);
        // It leaves out the examples in the documentation. Words choose among the tests that it knows.
        if words.is_empty() {
            runs.push(&["test", "--release", "--doc", "--package", "libpvm"]);
        }
    } else {
        // Without nextest the binaries run one after another, each on two threads.
        runs.push(&["test", "--release", "--workspace", "--no-fail-fast"]);
    }
    for line in runs {
        let mut command = install::cargo(line)?;
        command.args(words);
        if !nextest {
            command.args(["--", "--include-ignored"]);
        }
        command
            .env("SEMPA_PREFIX", &prefix)
            .stdin(Stdio::null());
        if nextest && line[0] == "nextest" && std::env::var_os("NEXTEST_TEST_THREADS").is_none() {
            command.env("NEXTEST_TEST_THREADS", threads().to_string());
        }
        if std::env::var_os(SEED).is_none() {
            command.env(SEED, EVERY_TIME);
        }
        if !nextest {
            command.env("RUST_TEST_THREADS", "2");
        }
        good &= command.status()?.success();
    }
    if words.is_empty() {
        good &= hostile_bytes()?;
        good &= every_order()?;
    }
    println!(
        "test: {} in {} s (set-up included {} s){}",
        if good {
            "all tests passed"
        } else {
            "SOME TESTS FAILED"
        },
        begun.elapsed().as_secs(),
        start.elapsed().as_secs(),
        lack.map(|why| format!("; without hosts: {why}"))
            .unwrap_or_default()
    );
    Ok(good)
}

/// Tests at a time: those with hosts wait more than they compute.
fn threads() -> usize {
    std::thread::available_parallelism().map_or(2, |cores| cores.get() + 1)
}

/// The lints of the workspace, which the compiler does not look at: of unsafe blocks without a reason, for instance. True if
/// there is nothing to say, or no clippy to say it. What generates and builds code is taken from the build of the tests, so that
/// no more is compiled than has to be looked at.
fn lints() -> Result<bool> {
    if !Command::new("cargo")
        .args(["clippy", "--version"])
        .output()
        .is_ok_and(|done| done.status.success())
    {
        println!("test: there is no clippy; nobody looks at the lints");
        return Ok(true);
    }
    let begun = Instant::now();
    let mut command = install::cargo(&[
        "clippy",
        "--release",
        "--workspace",
        "--all-targets",
        "--quiet",
    ])?;
    command
        .args(["--", "--deny", "warnings"])
        .stdin(Stdio::null());
    let good = command.status()?.success();
    let verdict = if good {
        "nothing to complain of"
    } else {
        "THERE ARE COMPLAINTS"
    };
    println!(
        "test: clippy has looked at the workspace: {verdict}, in {} s",
        begun.elapsed().as_secs()
    );
    Ok(good)
}

/// From where properties are tried: every run tries the same, so that what fails is what was changed. Whoever looks for more
/// sets another number.
const SEED: &str = "PROPTEST_RNG_SEED";
const EVERY_TIME: &str = "20261122";

/// Random inputs for everything that reads what others have packed.
const HOSTILE_INPUTS: &str = "10000000";

/// Builds the crate beside the workspace that makes them, and runs it for about a minute.
fn hostile_bytes() -> Result<bool> {
    let folder = install::target()?.join("fuzz");
    let mut command = install::cargo(&[
        "run",
        "--release",
        "--manifest-path",
        "tests/fuzz/Cargo.toml",
    ])?;
    command
        .args(["--bin", "storm", "--", HOSTILE_INPUTS])
        .env("CARGO_TARGET_DIR", folder)
        .stdin(Stdio::null());
    Ok(command.status()?.success())
}

/// Rings and bells under every order of what two threads do, by the model checker, in a build of their own.
fn every_order() -> Result<bool> {
    let folder = install::target()?.join("loom");
    let mut command = install::cargo(&[
        "test",
        "--release",
        "--package",
        "sempa-ring",
        "--test",
        "model",
    ])?;
    let flags = format!(
        "{} --cfg loom",
        std::env::var("RUSTFLAGS").unwrap_or_default()
    );
    command
        .env("RUSTFLAGS", flags)
        .env("CARGO_TARGET_DIR", folder)
        .stdin(Stdio::null());
    Ok(command.status()?.success())
}
