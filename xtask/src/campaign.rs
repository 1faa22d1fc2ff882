//! `cargo xtask campaign`: runs checks that take too long for each change, in steps that can be
//! resumed.
//!
//! A campaign belongs to a commit and a seed. Each step that has ended has a line in the journal. A
//! campaign that is started again runs only the steps that have not passed.

mod journal;
mod steps;

use crate::runner;
use crate::skips::SkipDecider;
use crate::test;
use anyhow::{Context, Result, bail};
use clap::Args;
use journal::{Journal, StepOutcome, StepRecord};
use serde::Serialize;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};
use steps::{CAMPAIGN_PARTS, CampaignStep};
use xtask_install as install;

/// Time limit of one step. A step that exceeds the limit is killed and recorded as failed.
const STEP_TIMEOUT: Duration = Duration::from_secs(2 * 60 * 60);

#[derive(Args)]
pub(crate) struct CampaignArgs {
    /// Only these parts: matrices, lies, soak, conformance, fuzz, limits, models, properties,
    /// release
    #[arg(long, value_name = "PART", value_delimiter = ',')]
    only: Vec<String>,
    /// Start no further step after this time; the next campaign continues
    #[arg(long, value_name = "NUMBER")]
    minutes: Option<u64>,
    /// The seed for everything that is chosen at random; the number of the day otherwise
    #[arg(long, value_name = "NUMBER")]
    seed: Option<u64>,
    /// Forget what earlier campaigns have run
    #[arg(long)]
    fresh: bool,
    /// Where journal, summary and logs go
    #[arg(long, value_name = "DIR")]
    results: Option<PathBuf>,
    /// Print the steps and run none
    #[arg(long)]
    list: bool,
}

/// Number of steps of one part by outcome, and the total duration of the steps.
#[derive(Clone, Debug, Default, Serialize)]
struct PartSummary {
    part: String,
    passed: usize,
    failed: usize,
    skipped: usize,
    left: usize,
    seconds: u64,
}

/// The content of `summary.json`.
#[derive(Debug, Serialize)]
struct CampaignSummary {
    commit: String,
    seed: u64,
    complete: bool,
    parts: Vec<PartSummary>,
    failures: Vec<StepRecord>,
    skipped: Vec<StepRecord>,
}

/// Runs the steps of the campaign that have not passed yet. Returns false if a step has failed.
///
/// # Errors
/// The set-up or the build fails, a part is unknown, or the results cannot be written.
pub(crate) fn run(args: &CampaignArgs) -> Result<bool> {
    if let Some(unknown_part) = args
        .only
        .iter()
        .find(|name| !CAMPAIGN_PARTS.contains(&&***name))
    {
        bail!(
            "there is no part {unknown_part:?}: {}",
            CAMPAIGN_PARTS.join(", ")
        );
    }
    let start = Instant::now();
    let seed = args.seed.unwrap_or_else(test::run_seed);
    let folder = match &args.results {
        Some(folder) => folder.clone(),
        None => install::target_folder()?.join("campaign"),
    };
    fs::create_dir_all(folder.join("logs")).with_context(|| folder.display().to_string())?;
    let profile = install::build_profile()?;
    let test_setup = test::set_up_and_install(&profile)?;
    let mut env = test::test_variables(&test_setup.prefix, seed);
    env.push(("SEMPA_TEST_FULL", "1".to_string()));
    let workspace_selection = runner::TestSelection {
        packages: &["--workspace"],
        env: &env,
    };
    let tests = runner::select_runner(&profile).build_and_list(workspace_selection)?;
    let mut skip_decider = SkipDecider::new(test_setup.failures, true);
    let all_steps = steps::all_steps(&tests, seed, &mut skip_decider, &profile);
    let selected_steps: Vec<&CampaignStep> = all_steps
        .iter()
        .filter(|step| args.only.is_empty() || args.only.contains(&step.part.to_string()))
        .collect();
    if args.list {
        selected_steps
            .iter()
            .for_each(|step| println!("{}", step.id));
        return Ok(true);
    }
    let commit = commit_description();
    println!(
        "campaign: {} steps, commit {commit}, seed {seed}",
        selected_steps.len()
    );
    let mut journal = Journal::open(&folder, &commit, seed, args.fresh)?;
    let deadline = args
        .minutes
        .map(|minutes| start + Duration::from_secs(minutes * 60));
    for step in &selected_steps {
        if journal.has_passed(&step.id) {
            continue;
        }
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            println!("campaign: the time is over");
            break;
        }
        let record = run_step(step, &folder, &env)?;
        println!(
            "campaign: {:?} in {:.0} s: {}",
            record.outcome, record.seconds, record.step
        );
        journal.append(record)?;
    }
    write_summary(&selected_steps, &journal, &folder)
}

/// Returns the description of the checked-out commit by git; `unknown` if git fails.
fn commit_description() -> String {
    let git_result = Command::new("git")
        .args(["describe", "--always", "--dirty", "--abbrev=12"])
        .current_dir(xtask_install::project_folder())
        .output();
    let text = git_result.map(|git_result| {
        String::from_utf8_lossy(&git_result.stdout)
            .trim()
            .to_string()
    });
    text.ok()
        .filter(|text| !text.is_empty())
        .unwrap_or_else(|| "unknown".to_string())
}

/// Runs one step, unless the machine cannot run it. Writes the step's output to a log file and
/// returns the record for the journal.
fn run_step(step: &CampaignStep, folder: &Path, env: &[(&str, String)]) -> Result<StepRecord> {
    let start = Instant::now();
    let log_path = folder
        .join("logs")
        .join(format!("{}.log", step.log_file_name()));
    let (outcome, outcome_reason) = match &step.skip_reason {
        Some(reason) => (StepOutcome::Skipped, reason.clone()),
        None => run_program(step, &log_path, env)?,
    };
    Ok(StepRecord {
        step: step.id.clone(),
        part: step.part.to_string(),
        outcome,
        why: outcome_reason,
        seconds: start.elapsed().as_secs_f64(),
        log: log_path.display().to_string(),
    })
}

/// Runs the program of a step and waits for its end, at most for [`STEP_TIMEOUT`]. Returns the
/// outcome and the reason for it.
fn run_program(
    step: &CampaignStep,
    log_path: &Path,
    env: &[(&str, String)],
) -> Result<(StepOutcome, String)> {
    let log_file = fs::File::create(log_path).with_context(|| log_path.display().to_string())?;
    let mut command = Command::new(&step.program);
    command
        .args(&step.arguments)
        .current_dir(&step.folder)
        .envs(env.iter().map(|(name, value)| (name, value)))
        .envs(step.env.iter().map(|(name, value)| (name, value)))
        .stdin(Stdio::null())
        .stdout(log_file.try_clone()?)
        .stderr(log_file)
        .process_group(0);
    let mut child = command
        .spawn()
        .with_context(|| step.program.display().to_string())?;
    let deadline = Instant::now() + STEP_TIMEOUT;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(if status.success() {
                (StepOutcome::Passed, String::new())
            } else {
                (StepOutcome::Failed, status.to_string())
            });
        }
        if Instant::now() >= deadline {
            // The step runs in a process group of its own, which is killed as a whole.
            let process_group = format!("-{}", child.id());
            let _ = Command::new("kill")
                .args(["-KILL", "--", &process_group])
                .status();
            child.wait()?;
            let reason = format!("stopped after {} s", STEP_TIMEOUT.as_secs());
            return Ok((StepOutcome::Failed, reason));
        }
        sleep(Duration::from_millis(100));
    }
}

/// Writes the summary of the campaign to `folder` and prints the summary. Returns false if a step
/// has failed.
fn write_summary(steps: &[&CampaignStep], journal: &Journal, folder: &Path) -> Result<bool> {
    let mut parts: Vec<PartSummary> = Vec::new();
    let (mut failures, mut skipped) = (Vec::new(), Vec::new());
    for step in steps {
        if parts.last().is_none_or(|part| part.part != step.part) {
            parts.push(PartSummary {
                part: step.part.to_string(),
                ..PartSummary::default()
            });
        }
        let part = parts.last_mut().context("just added")?;
        let Some(record) = journal.last_record(&step.id) else {
            part.left += 1;
            continue;
        };
        part.seconds += record.seconds as u64;
        match record.outcome {
            StepOutcome::Passed => part.passed += 1,
            StepOutcome::Failed => {
                part.failed += 1;
                failures.push(record.clone());
            }
            StepOutcome::Skipped => {
                part.skipped += 1;
                skipped.push(record.clone());
            }
        }
    }
    let summary = CampaignSummary {
        commit: journal.commit.clone(),
        seed: journal.seed,
        complete: parts.iter().all(|part| part.left == 0),
        parts,
        failures,
        skipped,
    };
    let text = summary_text(&summary);
    print!("{text}");
    fs::write(folder.join("summary.txt"), &text)?;
    fs::write(
        folder.join("summary.json"),
        serde_json::to_string_pretty(&summary)?,
    )?;
    Ok(summary.failures.is_empty())
}

/// Formats the summary as text.
fn summary_text(summary: &CampaignSummary) -> String {
    let mut text = format!(
        "campaign of {} with seed {}\n",
        summary.commit, summary.seed
    );
    for part in &summary.parts {
        text += &format!(
            "{:12} {:4} passed {:3} failed {:3} skipped {:3} left {:6} s\n",
            part.part, part.passed, part.failed, part.skipped, part.left, part.seconds
        );
    }
    for record in &summary.failures {
        text += &format!("failed: {}: {}: {}\n", record.step, record.why, record.log);
    }
    for record in &summary.skipped {
        text += &format!("skipped: {}: {}\n", record.step, record.why);
    }
    if !summary.complete {
        text += "not complete: start it again for the steps that are left\n";
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The summary also names the log file of each failed step.
    #[test]
    fn summary_names_failures_and_what_is_left() {
        let failure = StepRecord {
            step: "fuzz/3".into(),
            part: "fuzz".into(),
            outcome: StepOutcome::Failed,
            why: "exit status: 101".into(),
            seconds: 2.0,
            log: "logs/fuzz-3.log".into(),
        };
        let text = summary_text(&CampaignSummary {
            commit: "abc".into(),
            seed: 7,
            complete: false,
            parts: vec![PartSummary {
                part: "fuzz".into(),
                failed: 1,
                left: 4,
                ..PartSummary::default()
            }],
            failures: vec![failure],
            skipped: Vec::new(),
        });
        assert!(text.contains("1 failed"), "{text}");
        assert!(
            text.contains("failed: fuzz/3: exit status: 101: logs/fuzz-3.log"),
            "{text}"
        );
        assert!(text.contains("not complete"), "{text}");
    }
}
