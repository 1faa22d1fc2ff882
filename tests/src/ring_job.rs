//! A job that computes in a ring (`tests/programs/ring_job.c`, and `own_ring.c`, whose tasks write
//! self-checkpoints). A test can compute every line that the job writes, so it can check the
//! results.

use crate::run::wait_for;
use crate::vm::{OrPanicWithLogs, Vm};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::Duration;

/// Time limit for each wait of a test for a job, on a loaded machine.
const JOB_TIMEOUT: Duration = Duration::from_secs(300);
/// Number of tasks of a job in addition to the first one.
pub const WORKER_COUNT: usize = 4;
const MODULUS: i64 = 1_000_003;
/// Work of a task in one round: microseconds of computation if positive, microseconds of sleep if
/// negative. Sleep leaves the processors to the system under test.
const ROUND_WORK_US: i32 = -2000;
/// Work of a task of a small job in one round, with the signs of [`ROUND_WORK_US`]. Several small
/// jobs run at the same time, so the sleep is longer than in [`ROUND_WORK_US`].
const SMALL_JOB_ROUND_WORK_US: i32 = -10_000;
/// Number of rounds that no job reaches. A job ends when [`RingJob::end_and_check`] requests it.
pub const ENDLESS_ROUND_COUNT: &str = "100000000";

/// Returns the sums that a job with this number of workers writes in its first `round_count`
/// rounds. Element `i` is the sum after round `i`.
fn expected_sums(worker_count: usize, round_count: i64) -> Vec<i64> {
    let next_sum = |sum: i64, state: i64| (sum * 31 + state) % MODULUS;
    let mut states = vec![0; worker_count + 1];
    let (mut sum, mut messages, mut sums) = (1, Vec::new(), Vec::new());
    for round in 0..round_count {
        for (index, state) in (0..).zip(&mut states) {
            *state = (*state * 17 + round + index) % MODULUS;
            sum = next_sum(sum, *state);
        }
        messages.push(states[1..].to_vec());
        if round >= 2 {
            sum = messages[round as usize - 2]
                .iter()
                .fold(sum, |sum, message| next_sum(sum, *message));
        }
        sums.push(sum);
    }
    sums
}

/// A job and the folder to which it writes.
#[derive(Debug)]
pub struct RingJob {
    /// The folder with the job's log and result.
    pub folder: PathBuf,
    worker_count: usize,
    /// The tid of the job's first task.
    pub tid: String,
}

/// A round that the job has computed, and the time of its end in microseconds since 1970.
pub type ComputedRound = (i64, u64);

/// The parameters with which a job is started.
struct JobParameters<'a> {
    program: &'a str,
    folder: &'a str,
    /// Option of the console's `spawn` command that selects the host of the first task.
    host_option: &'a str,
    worker_count: usize,
    round_work_us: i32,
    /// The host of all workers; `None` if the job does not select their hosts.
    worker_host: Option<&'a str>,
}

impl Default for JobParameters<'_> {
    fn default() -> Self {
        JobParameters {
            program: "ring_job",
            folder: "ring",
            host_option: "-h1",
            worker_count: WORKER_COUNT,
            round_work_us: ROUND_WORK_US,
            worker_host: None,
        }
    }
}

impl RingJob {
    /// Starts a job. `host_option` is the option of the console's `spawn` command that selects the
    /// host of the first task.
    ///
    /// # Panics
    /// The job does not start.
    pub fn start(vm: &Vm<'_>, host_option: &str) -> Self {
        Self::start_with_parameters(
            vm,
            &JobParameters {
                host_option,
                ..JobParameters::default()
            },
        )
    }

    /// As [`RingJob::start`]. `round_work_us` is the work of each task in a round, with the signs
    /// of `ROUND_WORK_US`.
    ///
    /// # Panics
    /// The job does not start.
    pub fn start_slow(vm: &Vm<'_>, host_option: &str, round_work_us: i32) -> Self {
        Self::start_with_parameters(
            vm,
            &JobParameters {
                host_option,
                round_work_us,
                ..JobParameters::default()
            },
        )
    }

    /// As [`RingJob::start`], with a job that writes to the folder `folder` of the virtual
    /// machine's home.
    ///
    /// # Panics
    /// The job does not start.
    pub fn start_in_folder(vm: &Vm<'_>, folder: &str, host_option: &str) -> Self {
        Self::start_with_parameters(
            vm,
            &JobParameters {
                host_option,
                folder,
                ..JobParameters::default()
            },
        )
    }

    /// Starts a small job that writes to the folder `folder` of the virtual machine's home. Its
    /// first task is on h1, and its only worker is on `host`.
    ///
    /// # Panics
    /// The job does not start.
    pub fn start_small(vm: &Vm<'_>, folder: &str, host: &str) -> Self {
        // A job on an earlier virtual machine may have used this folder.
        let _ = std::fs::remove_dir_all(vm.user_home().join(folder));
        Self::start_with_parameters(
            vm,
            &JobParameters {
                folder,
                worker_count: 1,
                round_work_us: SMALL_JOB_ROUND_WORK_US,
                worker_host: Some(host),
                ..JobParameters::default()
            },
        )
    }

    /// As [`RingJob::start`], with a job whose tasks write self-checkpoints if the environment
    /// requests them.
    ///
    /// # Panics
    /// The job does not start.
    pub fn start_with_self_checkpoints(vm: &Vm<'_>, host_option: &str) -> Self {
        Self::start_with_parameters(
            vm,
            &JobParameters {
                program: "own_ring",
                host_option,
                ..JobParameters::default()
            },
        )
    }

    fn start_with_parameters(vm: &Vm<'_>, parameters: &JobParameters<'_>) -> Self {
        vm.compile_program(parameters.program).expect("gcc");
        let folder = make_job_folder(vm, parameters.folder);
        let (worker_count, round_work_us) = (
            parameters.worker_count.to_string(),
            parameters.round_work_us.to_string(),
        );
        let path = folder.to_str().expect("text");
        let mut arguments = vec![
            parameters.host_option,
            parameters.program,
            &worker_count,
            ENDLESS_ROUND_COUNT,
            &round_work_us,
            path,
        ];
        arguments.extend(parameters.worker_host);
        let tid = vm.spawn_connected(&arguments).or_panic_with_logs(vm);
        Self {
            folder,
            worker_count: parameters.worker_count,
            tid,
        }
    }

    /// Returns a job with [`WORKER_COUNT`] workers that was not started by [`RingJob`], or that
    /// writes to another folder than at its start.
    pub fn from_existing(folder: PathBuf, tid: String) -> Self {
        Self {
            folder,
            worker_count: WORKER_COUNT,
            tid,
        }
    }

    fn computed_round_count(&self) -> usize {
        std::fs::read_to_string(self.folder.join("log"))
            .map(|log| log.lines().count())
            .unwrap_or_default()
    }

    /// Returns all rounds that the job has computed, in the order of time, including rounds that a
    /// rollback has undone. Ignores an incomplete last line.
    pub fn computed_rounds(&self) -> Vec<ComputedRound> {
        let text = std::fs::read_to_string(self.folder.join("times")).unwrap_or_default();
        let complete_lines = text.rfind('\n').map_or("", |end| &text[..end]);
        let parse_round = |line: &str| {
            line.split_once(' ')
                .and_then(|(round, ended_at)| Some((round.parse().ok()?, ended_at.parse().ok()?)))
        };
        complete_lines.lines().filter_map(parse_round).collect()
    }

    /// Waits until the job has computed `round_count` more rounds.
    ///
    /// # Panics
    /// The rounds are not computed within the time limit.
    pub fn wait_for_rounds(&self, vm: &Vm<'_>, round_count: usize) {
        let target_count = self.computed_round_count() + round_count;
        let progress = wait_for(JOB_TIMEOUT, || {
            let line_count = self.computed_round_count();
            if line_count >= target_count {
                Ok(())
            } else {
                Err(format!("{line_count} of {target_count} rounds"))
            }
        });
        progress.or_panic_with_logs(vm);
    }

    /// Checks that the job's log has each line once and that all lines so far are correct.
    pub fn check_log(&self) {
        let log = std::fs::read_to_string(self.folder.join("log")).expect("there");
        let complete_lines = log.rfind('\n').map_or("", |end| &log[..end]);
        let line_count = complete_lines.lines().count();
        assert_eq!(
            complete_lines.lines().collect::<Vec<_>>(),
            expected_log_lines(&expected_sums(self.worker_count, line_count as i64)),
            "{:?}",
            self.folder
        );
    }

    /// Ends the job and waits for its end. Checks that the result is correct and that the log has
    /// each line once.
    ///
    /// # Panics
    /// The job does not end, or a check fails.
    pub fn end_and_check(&self, vm: &Vm<'_>) {
        std::fs::write(self.folder.join("last"), "").expect("written");
        let result = wait_for(JOB_TIMEOUT, || {
            let text = std::fs::read_to_string(self.folder.join("result")).unwrap_or_default();
            text.trim()
                .parse::<i64>()
                .map_err(|_| format!("no result after {} rounds", self.computed_round_count()))
        });
        let result = result.or_panic_with_logs(vm);
        let log = std::fs::read_to_string(self.folder.join("log")).expect("there");
        let sums = expected_sums(self.worker_count, log.lines().count() as i64);
        assert_eq!(Some(&result), sums.last());
        assert!(log.lines().eq(expected_log_lines(&sums)), "{log}");
    }
}

/// Returns the expected lines of the log for these sums.
fn expected_log_lines(sums: &[i64]) -> Vec<String> {
    (0..)
        .zip(sums)
        .map(|(round, sum): (i64, _)| format!("{round} {sum}"))
        .collect()
}

/// Makes the folder of a job. Returns its path.
fn make_job_folder(vm: &Vm<'_>, name: &str) -> PathBuf {
    let folder = vm.user_home().join(name);
    std::fs::create_dir_all(&folder).expect("a folder");
    std::fs::write(folder.join("times"), "").expect("written");
    // The job's user must be able to write.
    let home_metadata = std::fs::metadata(vm.user_home()).expect("there");
    for path in [&folder, &folder.join("times")] {
        std::os::unix::fs::chown(path, Some(home_metadata.uid()), Some(home_metadata.gid()))
            .expect("chown");
    }
    folder
}
