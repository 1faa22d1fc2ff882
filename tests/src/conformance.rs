//! The conformance suite: statements about the interface of PVM 3, each checked by a C program in
//! `tests/conformance`.
//!
//! A program prints one line for each statement, `ok STATEMENT` or `not ok STATEMENT: got …, wanted
//! …`, and finally `end`. The same programs run on three systems:
//!
//! - Debian's PVM 3.4.6, which proves that the programs are right;
//! - Sempa, with programs that are compiled with our header;
//! - Sempa, with the binaries that were compiled and linked for Debian's library.
//!
//! If a statement is false on a system, `differences.txt` lists the statement, the system, and a
//! text of `docs/COMPATIBILITY.md` that explains the difference to users.

use crate::run::{CommandResult, run_successfully, run_to_end};
use crate::testbed::{Host, Testbed, wait_until_no_process};
use crate::vm::{Vm, VmSettings};
use crate::{real_pvm::RealVm, requirements};
use anyhow::{Context, Result, bail, ensure};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Time limit for one program on a loaded machine. The programs' own timeouts are shorter.
const PROGRAM_TIMEOUT: Duration = Duration::from_secs(90);
/// Time limit for one compilation on a loaded machine.
const COMPILE_TIMEOUT: Duration = Duration::from_secs(120);
/// Time limit for a virtual machine to end after a program has halted it.
const HALT_TIMEOUT: Duration = Duration::from_secs(5);
/// Number of lines at the end of a program's standard error that a report shows.
const STDERR_LINES_SHOWN: usize = 4;
/// Number of hosts in the testbed. Programs add the hosts that they need to the virtual machine.
const HOST_COUNT: usize = 3;

/// A system on which the programs run, and the library for which they are built.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum System {
    /// Debian's PVM 3.4.6 with its own library.
    Pvm3,
    /// Sempa, with programs compiled with our header and linked with our library.
    Sempa,
    /// Sempa, with programs compiled and linked for Debian's library.
    SempaUnchanged,
}

impl System {
    /// Returns the name of the system in tables and reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pvm3 => "pvm3",
            Self::Sempa => "sempa",
            Self::SempaUnchanged => "unchanged",
        }
    }

    /// True if `name`, the first column of a line in `differences.txt`, names this system. Both
    /// variants of Sempa have the name `sempa`.
    fn matches_name(self, name: &str) -> bool {
        name == if self == Self::Pvm3 { "pvm3" } else { "sempa" }
    }
}

/// The result of checking one statement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Name of the program that has checked the statement.
    pub program: String,
    pub statement: String,
    /// `None` if the statement is true; otherwise what the program observed and what it expected.
    pub failure: Option<String>,
}

impl Outcome {
    fn program_and_statement(&self) -> (&str, &str) {
        (&self.program, &self.statement)
    }
}

/// One line of `differences.txt`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// The system on which the statement is false: `pvm3` or `sempa`.
    pub system: String,
    pub statement: String,
    /// A text of `docs/COMPATIBILITY.md` that explains the difference.
    pub explanation: String,
}

/// Returns the folder with the sources of the programs.
pub fn program_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("conformance")
}

/// Returns the names of all programs, sorted.
///
/// # Errors
/// The folder cannot be read.
pub fn program_names() -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(program_folder())? {
        let path = entry?.path();
        if path
            .extension()
            .is_some_and(|extension| extension == "c" || extension == "f")
        {
            names.push(
                path.file_stem()
                    .unwrap_or_default()
                    .to_string_lossy()
                    .into_owned(),
            );
        }
    }
    names.sort();
    Ok(names)
}

/// Returns the known differences, each with its explanation in `docs/COMPATIBILITY.md`.
///
/// # Errors
/// A line is malformed, or its explanation is not in `docs/COMPATIBILITY.md`.
pub fn known_differences() -> Result<Vec<Difference>> {
    let text = fs::read_to_string(program_folder().join("differences.txt"))?;
    let compatibility_text =
        fs::read_to_string(program_folder().join("../../docs/COMPATIBILITY.md"))?;
    let mut differences = Vec::new();
    for line in text
        .lines()
        .filter(|line| !line.trim().is_empty() && !line.starts_with('#'))
    {
        let columns: Vec<&str> = line.split(" | ").map(str::trim).collect();
        let [system, statement, explanation] = columns[..] else {
            bail!("differences.txt: not three parts: {line}")
        };
        ensure!(
            ["pvm3", "sempa"].contains(&system),
            "differences.txt: no such system: {line}"
        );
        ensure!(
            compatibility_text.contains(explanation),
            "docs/COMPATIBILITY.md does not say: {explanation}"
        );
        let to_text = |column: &str| column.to_string();
        differences.push(Difference {
            system: to_text(system),
            statement: to_text(statement),
            explanation: to_text(explanation),
        });
    }
    Ok(differences)
}

/// Compiles programs, and runs each of them on a new virtual machine of a system. `name_parts`
/// contains parts of program names; if it is empty, all programs run.
///
/// # Errors
/// The system or the compiler does not work. A failed program is an outcome, not an error.
pub fn run_programs(system: System, name_parts: &[String]) -> Result<Vec<Outcome>> {
    let prefix = if system == System::Pvm3 {
        None
    } else {
        Some(requirements::installed_prefix()?)
    };
    let testbed = Testbed::new(HOST_COUNT, prefix.as_deref(), &[])?;
    let program_folder = testbed.root_home().join("pvm3/bin/LINUX64");
    let our_prefix = prefix.as_deref().filter(|_| system == System::Sempa);
    let mut names = program_names()?;
    names.retain(|name| {
        name_parts.is_empty()
            || name_parts
                .iter()
                .any(|name_part| name.contains(name_part.as_str()))
    });
    compile_programs(&names, our_prefix, &program_folder)?;
    link_group_server(prefix.as_deref(), &program_folder)?;
    let mut outcomes = Vec::new();
    for name in names {
        let result = run_program_on_new_vm(&testbed, system, &program_folder.join(&name));
        outcomes.extend(parse_outcomes(
            &name,
            result.map_err(|error| format!("{error:#}")),
        ));
    }
    Ok(outcomes)
}

fn run_program_on_new_vm(
    testbed: &Testbed,
    system: System,
    program: &Path,
) -> Result<CommandResult> {
    if system == System::Pvm3 {
        let vm = RealVm::start(testbed)?;
        let result = run_to_end(vm.command(testbed.host(1), program), PROGRAM_TIMEOUT);
        vm.halt_or_kill()?;
        return result;
    }
    let vm = Vm::start(testbed, VmSettings::default())?;
    let result = run_to_end(vm.user_command(testbed.host(1), program), PROGRAM_TIMEOUT);
    let logs = if result.as_ref().is_ok_and(CommandResult::succeeded) {
        String::new()
    } else {
        vm.events_and_logs()
    };
    let wait_until_halted = |timeout| {
        testbed
            .hosts()
            .iter()
            .try_for_each(|host| wait_until_no_process(host, "pvmd", timeout))
    };
    // The program may have halted the virtual machine, so a failed halt is an error only if a
    // daemon remains.
    let halt_result = vm
        .halt_and_wait()
        .or_else(|error| wait_until_halted(HALT_TIMEOUT).map_err(|_| error));
    if halt_result.is_err() {
        testbed.hosts().iter().for_each(Host::kill_all_processes);
        wait_until_halted(PROGRAM_TIMEOUT)?;
    }
    halt_result.with_context(|| format!("{result:?}\n{logs}"))?;
    result.with_context(|| logs)
}

/// Parses the outcomes in a program's output. If the program did not run to its end or its exit
/// status is not 0, adds a failed outcome with [`exit_statement`].
fn parse_outcomes(program: &str, result: Result<CommandResult, String>) -> Vec<Outcome> {
    let new_outcome = |statement: &str, failure: Option<String>| Outcome {
        program: program.to_string(),
        statement: statement.to_string(),
        failure,
    };
    let (text, start_error) = match &result {
        Ok(result) => (result.stdout.as_str(), None),
        Err(error_text) => (error_text.as_str(), Some(error_text.clone())),
    };
    let mut outcomes: Vec<Outcome> = text
        .lines()
        .filter_map(|line| {
            let line = line.strip_prefix("stdout: ").unwrap_or(line);
            if let Some(statement) = line.strip_prefix("ok ") {
                return Some(new_outcome(statement, None));
            }
            let (statement, failure) = line.strip_prefix("not ok ")?.split_once(": ")?;
            Some(new_outcome(statement, Some(failure.to_string())))
        })
        .collect();
    let has_ended = result
        .as_ref()
        .is_ok_and(|result| result.succeeded() && result.stdout.lines().any(|line| line == "end"));
    if !has_ended {
        let last_statement = outcomes
            .last()
            .map_or("its start".to_string(), |last_statement| {
                format!("{:?}", last_statement.statement)
            });
        let error_text = start_error.unwrap_or_else(|| {
            result.as_ref().map_or(String::new(), |result| {
                format!(
                    "{}, the end of its standard error: {}",
                    result.status,
                    last_lines(&result.stderr)
                )
            })
        });
        outcomes.push(new_outcome(
            &exit_statement(program),
            Some(format!("not after {last_statement}: {error_text}")),
        ));
    }
    outcomes
}

/// Returns the statement that is true if a program runs to its end and exits with status 0.
fn exit_statement(program: &str) -> String {
    format!("{program} runs to its end")
}

/// Returns the last [`STDERR_LINES_SHOWN`] lines of a text, joined by ` / `.
fn last_lines(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(STDERR_LINES_SHOWN)..].join(" / ")
}

/// Compiles the programs into the folder `target_folder`: against our header and library below
/// `our_prefix`, or against Debian's if `our_prefix` is `None`.
fn compile_programs(
    names: &[String],
    our_prefix: Option<&Path>,
    target_folder: &Path,
) -> Result<()> {
    let thread_count = std::thread::available_parallelism()
        .map_or(1, usize::from)
        .min(names.len().max(1));
    std::thread::scope(|scope| {
        let chunks = names.chunks(names.len().div_ceil(thread_count).max(1));
        let threads: Vec<_> = chunks
            .map(|chunk| {
                scope.spawn(|| {
                    chunk
                        .iter()
                        .try_for_each(|name| compile_program(name, our_prefix, target_folder))
                })
            })
            .collect();
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().expect("compiling does not panic"))
    })
}

fn compile_program(name: &str, our_prefix: Option<&Path>, target_folder: &Path) -> Result<()> {
    let source = program_folder().join(name);
    let (compiler, options, source, libraries): (_, &[&str], _, &[&str]) =
        if source.with_extension("c").exists() {
            (
                "gcc",
                &["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror"],
                source.with_extension("c"),
                &[],
            )
        } else {
            (
                "gfortran",
                &["-O1", "-w", "-fallow-argument-mismatch"],
                source.with_extension("f"),
                &["-lfpvm3"],
            )
        };
    let mut command = Command::new(compiler);
    command
        .args(options)
        .arg("-o")
        .arg(target_folder.join(name))
        .arg(&source);
    match our_prefix {
        Some(prefix) => command
            .arg("-I")
            .arg(prefix.join("include"))
            .arg("-L")
            .arg(prefix.join("lib")),
        // gfortran does not search `/usr/include` by default.
        None => command.arg("-I/usr/include"),
    };
    // PVM's examples are linked with both libraries, so these programs are too.
    command
        .args(libraries)
        .args(["-Wl,--no-as-needed", "-lgpvm3", "-lpvm3", "-lm"]);
    run_successfully(command, COMPILE_TIMEOUT)
        .map(|_| ())
        .with_context(|| format!("compiling {}", source.display()))
}

/// Links PVM's group server into the folder `folder` unless the library under `prefix` is Sempa's,
/// which needs no group server.
fn link_group_server(prefix: Option<&Path>, folder: &Path) -> Result<()> {
    let is_ours = prefix.is_some_and(|prefix| prefix.join("lib/libgpvm3.so.3").exists());
    if is_ours {
        Ok(())
    } else {
        Ok(symlink("/usr/bin/pvmgs", folder.join("pvmgs"))?)
    }
}

/// The result of a comparison of several systems.
#[derive(Debug, Default)]
pub struct Comparison {
    /// Unexplained results, one line each.
    pub unexplained: Vec<String>,
    /// Explained differences, one line each.
    pub explained: Vec<String>,
    /// Number of true statements and number of checked statements, by program and system.
    pub statement_counts: BTreeMap<(String, System), (usize, usize)>,
    /// All statements that were checked on any system.
    pub statements: BTreeSet<String>,
}

/// Compares the outcomes of all systems with the known differences. `all_have_run` is true if all
/// programs have run; only then an unused difference is reported.
pub fn compare_with_known(
    runs: &[(System, Vec<Outcome>)],
    known_differences: &[Difference],
    all_have_run: bool,
) -> Comparison {
    let mut comparison = Comparison::default();
    for (system, outcomes) in runs {
        let mut statements = BTreeSet::new();
        for Outcome {
            program,
            statement,
            failure,
        } in outcomes
        {
            let counts = comparison
                .statement_counts
                .entry((program.clone(), *system))
                .or_default();
            counts.0 += usize::from(failure.is_none());
            counts.1 += 1;
            comparison.statements.insert(statement.clone());
            if !statements.insert(statement.clone()) {
                comparison.unexplained.push(format!(
                    "{}: {program}: said twice: {statement}",
                    system.name()
                ));
            }
            let applies = |line: &&Difference| {
                line.statement == *statement && system.matches_name(&line.system)
            };
            match (known_differences.iter().find(applies), failure) {
                (None, None) => {}
                (None, Some(failure)) => {
                    comparison.unexplained.push(format!(
                        "{}: {program}: {statement}: {failure}",
                        system.name()
                    ));
                }
                (Some(line), Some(_)) => {
                    comparison.explained.push(format!(
                        "{}: {statement} ({})",
                        system.name(),
                        line.explanation
                    ));
                }
                (Some(_), None) => comparison.unexplained.push(format!(
                    "{}: {program}: {statement}: it holds, differences.txt says it does not",
                    system.name()
                )),
            }
        }
        let is_unused = |line: &&Difference| {
            system.matches_name(&line.system) && !statements.contains(&line.statement)
        };
        for line in known_differences
            .iter()
            .filter(is_unused)
            .filter(|_| all_have_run)
        {
            comparison.unexplained.push(format!(
                "{}: nobody said: {}",
                system.name(),
                line.statement
            ));
        }
    }
    comparison.add_missing_statements(runs);
    comparison
}

impl Comparison {
    /// For each system, adds an unexplained result for each statement that was checked only on
    /// other systems. Omits the statements of programs that have not run to their end on this
    /// system.
    fn add_missing_statements(&mut self, runs: &[(System, Vec<Outcome>)]) {
        let all_statements: BTreeSet<(&str, &str)> = runs
            .iter()
            .flat_map(|(_, system_outcomes)| system_outcomes)
            .map(Outcome::program_and_statement)
            .collect();
        for (system, outcomes) in runs {
            let system_statements: BTreeSet<(&str, &str)> = outcomes
                .iter()
                .map(Outcome::program_and_statement)
                .collect();
            // A program that has not run to its end has its own unexplained result.
            let has_failed = |program: &str| {
                system_statements.contains(&(program, exit_statement(program).as_str()))
            };
            for (program, statement) in all_statements
                .difference(&system_statements)
                .filter(|(program, _)| !has_failed(program))
            {
                if *statement != exit_statement(program) {
                    self.unexplained.push(format!(
                        "{}: {program}: never said: {statement}",
                        system.name()
                    ));
                }
            }
        }
    }

    /// Returns a table with a line per program and a column per system, and below it the explained
    /// and unexplained results.
    pub fn report(&self) -> String {
        let systems: BTreeSet<System> = self
            .statement_counts
            .keys()
            .map(|(_, system)| *system)
            .collect();
        let programs: BTreeSet<&String> = self
            .statement_counts
            .keys()
            .map(|(program, _)| program)
            .collect();
        let format_row = |name: &str, cells: Vec<String>| {
            format!(
                "{name:<16}{}\n",
                cells
                    .iter()
                    .map(|format_cell| format!("{format_cell:>14}"))
                    .collect::<String>()
            )
        };
        let format_cell = |true_count: usize, checked_count: usize| {
            if true_count == checked_count {
                format!("{checked_count}")
            } else {
                format!("{true_count} of {checked_count}")
            }
        };
        let mut text = format_row(
            "",
            systems
                .iter()
                .map(|system| system.name().to_string())
                .collect(),
        );
        for program in programs {
            let counts = systems
                .iter()
                .map(|system| self.statement_counts.get(&(program.clone(), *system)));
            text += &format_row(
                program,
                counts
                    .map(|statement_count| {
                        statement_count.map_or("-".into(), |(true_count, checked_count)| {
                            format_cell(*true_count, *checked_count)
                        })
                    })
                    .collect(),
            );
        }
        let total_cell = |system: &System| {
            let system_counts = self
                .statement_counts
                .iter()
                .filter(|((_, counted_system), _)| counted_system == system);
            system_counts.fold((0, 0), |sums, (_, counts)| {
                (sums.0 + counts.0, sums.1 + counts.1)
            })
        };
        text += &format_row(
            "all",
            systems
                .iter()
                .map(total_cell)
                .map(|(true_count, checked_count)| format_cell(true_count, checked_count))
                .collect(),
        );
        for (title, lines) in [
            ("explained", &self.explained),
            ("NOT EXPLAINED", &self.unexplained),
        ] {
            if !lines.is_empty() {
                text += &format!("\n{title}:\n  {}\n", lines.join("\n  "));
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;

    fn command_result(status: i32, stdout: &str) -> Result<CommandResult, String> {
        Ok(CommandResult {
            status: std::process::ExitStatus::from_raw(status),
            stdout: stdout.into(),
            stderr: String::new(),
        })
    }

    fn known_difference(system: &str, statement: &str) -> Difference {
        Difference {
            system: system.into(),
            statement: statement.into(),
            explanation: "a defect".into(),
        }
    }

    fn unexplained_results(
        system: System,
        out: &str,
        known_differences: &[Difference],
    ) -> Vec<String> {
        compare_with_known(
            &[(system, parse_outcomes("p", command_result(0, out)))],
            known_differences,
            true,
        )
        .unexplained
    }

    #[test]
    fn only_a_sentence_that_fails_is_unexplained() {
        assert!(unexplained_results(System::Sempa, "ok a\nend\n", &[]).is_empty());
        assert_eq!(
            unexplained_results(System::Sempa, "not ok a: got 1, wanted 2\nend\n", &[]),
            ["sempa: p: a: got 1, wanted 2"]
        );
    }

    #[test]
    fn a_known_difference_explains_its_own_system() {
        let (pvm3_difference, out) = (
            [known_difference("pvm3", "a")],
            "not ok a: got 1, wanted 2\nend\n",
        );
        assert!(unexplained_results(System::Pvm3, out, &pvm3_difference).is_empty());
        assert_eq!(
            unexplained_results(System::SempaUnchanged, out, &pvm3_difference).len(),
            1
        );
        assert!(
            unexplained_results(
                System::SempaUnchanged,
                out,
                &[known_difference("sempa", "a")]
            )
            .is_empty()
        );
    }

    #[test]
    fn an_outdated_or_unused_difference_is_unexplained() {
        assert_eq!(
            unexplained_results(
                System::Pvm3,
                "ok a\nend\n",
                &[known_difference("pvm3", "a")]
            )
            .len(),
            1
        );
        assert_eq!(
            unexplained_results(
                System::Pvm3,
                "ok b\nend\n",
                &[known_difference("pvm3", "a")]
            )
            .len(),
            1
        );
    }

    #[test]
    fn a_failed_or_repeating_program_is_unexplained() {
        for outcome in [
            parse_outcomes("p", command_result(11, "ok a\n")),
            parse_outcomes("p", command_result(0, "ok a\n")),
            parse_outcomes("p", Err("stuck".into())),
        ] {
            assert_eq!(
                outcome.last().expect("it is said").statement,
                "p runs to its end"
            );
            assert!(outcome.last().expect("it is said").failure.is_some());
        }
        assert_eq!(
            unexplained_results(System::Pvm3, "ok a\nok a\nend\n", &[]).len(),
            1
        );
    }

    /// A statement that one system has checked must be checked on all systems.
    #[test]
    fn sentence_missing_on_one_system_is_unexplained() {
        let runs = [
            (
                System::Pvm3,
                parse_outcomes("p", command_result(0, "ok a\nok b\nend\n")),
            ),
            (
                System::Sempa,
                parse_outcomes("p", command_result(0, "ok a\nend\n")),
            ),
        ];
        assert_eq!(
            compare_with_known(&runs, &[], true).unexplained,
            ["sempa: p: never said: b"]
        );
    }
}
