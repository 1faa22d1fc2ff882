//! `cargo xtask conformance`: compares PVM 3.4.6 and Sempa with the conformance suite
//! (`tests/conformance`).

use crate::setup;
use anyhow::{Result, bail};
use sempa_tests::conformance::{self, Outcome, System};
use sempa_tests::requirements;
use xtask_install::{self as install, BuildParts};

/// Runs the programs of the suite on the systems that `against` names. `name_parts` contains parts
/// of program names; without any part, all programs run. If `as_installed` is true, nothing is
/// built or installed. Prints the differences. Returns false if there is an unexplained difference.
///
/// # Errors
/// The machine does not meet a requirement of the testbed, or a system does not start.
pub(crate) fn run(against: &str, name_parts: &[String], as_installed: bool) -> Result<bool> {
    if let Some(missing_requirement) = requirements::unmet_requirement() {
        bail!("no conformance run: {missing_requirement}");
    }
    let systems: &[System] = match against {
        "pvm3" => &[System::Pvm3],
        "sempa" => &[System::Sempa, System::SempaUnchanged],
        _ => &[System::Pvm3, System::Sempa, System::SempaUnchanged],
    };
    if !as_installed {
        setup::set_up_all()?;
        install::build(&install::build_profile()?, BuildParts::ProgramsAndHosts)?;
        install::install_files(
            &install::target_folder()?.join("sempa-prefix"),
            &install::build_profile()?,
        )?;
    }
    let runs: Result<Vec<(System, Vec<Outcome>)>> = std::thread::scope(|scope| {
        let workers: Vec<_> = systems
            .iter()
            .map(|system| {
                (
                    system,
                    scope.spawn(move || conformance::run_programs(*system, name_parts)),
                )
            })
            .collect();
        let system_outcomes = workers
            .into_iter()
            .map(|(system, worker)| (system, worker.join().expect("no panic in a run")));
        system_outcomes
            .map(|(system, outcomes)| Ok((*system, outcomes?)))
            .collect()
    });
    let comparison = conformance::compare_with_known(
        &runs?,
        &conformance::known_differences()?,
        name_parts.is_empty(),
    );
    print!("{}", comparison.report());
    println!(
        "\n{} sentences, {} differences unexplained",
        comparison.statements.len(),
        comparison.unexplained.len()
    );
    Ok(comparison.unexplained.is_empty())
}
