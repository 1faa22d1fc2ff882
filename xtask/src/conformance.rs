//! `cargo xtask conformance`: compares PVM 3.4.6 and Sempa with the conformance suite
//! (`tests/conformance`).

use crate::install::{self, BuildParts};
use crate::setup;
use anyhow::{Result, bail};
use sempa_tests::conformance::{self, Outcome, System};
use sempa_tests::requirements;

/// Runs the programs of the suite on the systems that `against` names. `chosen` are parts of
/// program names; if empty, all programs run. With `as_installed`, builds and installs nothing.
/// Returns false if there is an unexplained difference.
///
/// # Errors
/// The machine lacks something for a testbed, or a system does not start.
pub(crate) fn run(against: &str, chosen: &[String], as_installed: bool) -> Result<bool> {
    if let Some(lack) = requirements::lacks() {
        bail!("no conformance run: {lack}");
    }
    let systems: &[System] = match against {
        "pvm3" => &[System::Pvm3],
        "sempa" => &[System::Sempa, System::SempaUnchanged],
        _ => &[System::Pvm3, System::Sempa, System::SempaUnchanged],
    };
    if !as_installed {
        setup::set_up_all()?;
        install::build(&install::own_profile()?, BuildParts::ProgramsAndHosts)?;
        install::install_files(
            &install::target_folder()?.join("sempa-prefix"),
            &install::own_profile()?,
        )?;
    }
    let runs: Result<Vec<(System, Vec<Outcome>)>> = std::thread::scope(|scope| {
        let workers: Vec<_> = systems
            .iter()
            .map(|system| {
                (
                    system,
                    scope.spawn(move || conformance::outcomes(*system, chosen)),
                )
            })
            .collect();
        let joined = workers
            .into_iter()
            .map(|(system, worker)| (system, worker.join().expect("no panic in a run")));
        joined
            .map(|(system, outcomes)| Ok((*system, outcomes?)))
            .collect()
    });
    let verdict = conformance::judge(&runs?, &conformance::differences()?, chosen.is_empty());
    print!("{}", verdict.text());
    println!(
        "\n{} sentences, {} differences unexplained",
        verdict.sentences.len(),
        verdict.unexplained.len()
    );
    Ok(verdict.unexplained.is_empty())
}
