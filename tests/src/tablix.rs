//! Searches with Debian's unmodified tablix2, a PVM program that makes timetables.

use crate::run::{RunningCommand, run_successfully, wait_for};
use crate::timetable::{self, School, Solution};
use crate::vm::{OrPanicWithLogs, Vm};
use std::fs;
use std::os::unix::fs::chown;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(300);
/// Debian's programs that a search needs, each in the package with its name.
pub const TABLIX_PROGRAMS: [&str; 2] = ["tablix2", "tablix2_output"];

/// What a search looks for.
#[derive(Clone, Copy, Debug)]
pub struct SearchParameters {
    pub school: School,
    /// Number of tablix2's kernels, that is, its tasks that search.
    pub kernel_count: usize,
    /// Argument of tablix2: number of populations without improvement after which a kernel stops.
    pub finish_option: &'static str,
}

/// A running search and the folder of its results.
#[derive(Debug)]
pub struct TablixSearch {
    parameters: SearchParameters,
    command: RunningCommand,
    folder: PathBuf,
}

impl TablixSearch {
    /// Starts a search, whose results are in the folder `name` of the user's home.
    ///
    /// # Panics
    /// The folder exists, or the program does not start.
    pub fn start(vm: &Vm<'_>, name: &str, parameters: SearchParameters) -> Self {
        let folder = vm.user_home().join(name);
        fs::create_dir(&folder).expect("made");
        chown(&folder, Some(vm.user_id()), Some(vm.user_id())).expect("root may do so");
        let problem_path = folder.join("school.xml");
        fs::write(&problem_path, timetable::problem_xml(parameters.school, 1)).expect("written");
        let mut command = vm.user_command(vm.testbed().host(1), "tablix2");
        command.args([
            "-n",
            &parameters.kernel_count.to_string(),
            "-d",
            "3",
            "-p",
            parameters.finish_option,
            "-o",
        ]);
        command.arg(folder.join("found_")).arg(&problem_path);
        Self {
            parameters,
            command: RunningCommand::start(command, Stdio::null()).expect("it starts"),
            folder,
        }
    }

    /// Returns the tids of the kernels that run.
    ///
    /// # Panics
    /// The console fails.
    pub fn kernel_tids(vm: &Vm<'_>) -> Vec<String> {
        let tasks = vm.tasks().or_panic_with_logs(vm);
        let kernels = tasks
            .into_iter()
            .filter(|task| task.name.ends_with("tablix2_kernel"));
        kernels.map(|task| task.tid).collect()
    }

    /// Waits until all kernels run. Returns their tids.
    ///
    /// # Panics
    /// They do not run within the time limit.
    pub fn wait_for_kernels(&self, vm: &Vm<'_>) -> Vec<String> {
        let running_kernels = wait_for(TIMEOUT, || {
            let tids = Self::kernel_tids(vm);
            match tids.len() == self.parameters.kernel_count {
                true => Ok(tids),
                false => Err(format!("{tids:?} are there")),
            }
        });
        running_kernels.or_panic_with_logs(vm)
    }

    /// Returns the number of progress reports of all kernels so far.
    fn report_count(&self) -> usize {
        let count_in =
            |text: anyhow::Result<String>| text.unwrap_or_default().matches(" reports ").count();
        count_in(self.command.stdout_so_far()) + count_in(self.command.stderr_so_far())
    }

    /// Waits for as many further progress reports as there are kernels. Returns false if a kernel
    /// has finished.
    ///
    /// # Panics
    /// The reports do not come within the time limit.
    pub fn wait_for_progress(&self, vm: &Vm<'_>) -> bool {
        let kernel_count = self.parameters.kernel_count;
        let required_count = self.report_count() + kernel_count;
        let progress = wait_for(TIMEOUT, || match self.report_count() {
            _ if Self::kernel_tids(vm).len() < kernel_count => Ok(false),
            report_count if report_count >= required_count => Ok(true),
            report_count => Err(format!(
                "{report_count} reports, not {required_count}: {}",
                self.command.stderr_so_far().unwrap_or_default()
            )),
        });
        progress.or_panic_with_logs(vm)
    }

    /// Waits for the end of the search and checks the hard constraints. Returns one timetable for
    /// each kernel.
    ///
    /// # Panics
    /// The search fails, or a timetable violates a hard constraint.
    pub fn finish(self, vm: &Vm<'_>) -> Vec<Solution> {
        let output = self.command.wait_or_kill(TIMEOUT).or_panic_with_logs(vm);
        assert!(output.succeeded(), "{output:?}\n{}", vm.events_and_logs());
        let solution = |number: usize| {
            let csv_path = self.folder.join(format!("{number}.csv"));
            let mut command = vm.user_command(vm.testbed().host(1), "tablix2_output");
            command
                .arg("-o")
                .arg(&csv_path)
                .arg("csv")
                .arg(self.folder.join(format!("found_result{number}.xml")));
            run_successfully(command, TIMEOUT).expect("tablix2 reads its own result");
            timetable::check_solution(&fs::read_to_string(csv_path).expect("written"))
                .expect("nobody is needed twice")
        };
        (0..self.parameters.kernel_count).map(solution).collect()
    }
}
