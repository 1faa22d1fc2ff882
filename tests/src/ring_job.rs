//! A job that computes in a ring (`tests/programs/ring_job.c`, and `own_ring.c`, whose tasks write
//! self-checkpoints). Every line that the job writes is known in advance, so tests can check the
//! results.

use crate::run::wait_for;
use crate::vm::{OrPanicWithLogs, Vm};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::Duration;

/// Time limit for anything that a test waits for in a job, on a loaded machine.
const JOB_TIMEOUT: Duration = Duration::from_secs(300);
/// Number of tasks of a job in addition to the first one.
pub const WORKER_COUNT: usize = 4;
const MODULUS: i64 = 1_000_003;
/// Work of a task in one round: microseconds of computation if positive, microseconds of sleep if
/// negative. Sleep leaves the processors to the system under test.
const ROUND_WORK_US: i32 = -2000;
/// Work of a task of a small job in one round. Several small jobs run at the same time, so it is
/// longer than [`ROUND_WORK_US`].
const SMALL_JOB_ROUND_WORK_US: i32 = -10_000;
/// Number of rounds that no job reaches. A job ends when [`Job::finish`] requests it.
pub const ENDLESS_ROUNDS: &str = "100000000";

/// Returns the sums that a job with this number of workers writes in its first `rounds` rounds.
fn sums(workers: usize, rounds: i64) -> Vec<i64> {
    let next = |sum: i64, state: i64| (sum * 31 + state) % MODULUS;
    let mut states = vec![0; workers + 1];
    let (mut sum, mut notes, mut all) = (1, Vec::new(), Vec::new());
    for round in 0..rounds {
        for (index, state) in (0..).zip(&mut states) {
            *state = (*state * 17 + round + index) % MODULUS;
            sum = next(sum, *state);
        }
        notes.push(states[1..].to_vec());
        if round >= 2 {
            sum = notes[round as usize - 2]
                .iter()
                .fold(sum, |sum, note| next(sum, *note));
        }
        all.push(sum);
    }
    all
}

/// A running job and the folder to which it writes.
#[derive(Debug)]
pub struct Job {
    /// The folder with the job's log and result.
    pub folder: PathBuf,
    workers: usize,
    /// The tid of the job's first task.
    pub tid: String,
}

/// A round that the job has computed, and the time of its end in microseconds since 1970.
pub type ComputedRound = (i64, u64);

/// The parameters with which a job is started.
struct JobStart<'a> {
    program: &'a str,
    folder: &'a str,
    /// Option of the console's `spawn` command that selects the host of the first task.
    host_option: &'a str,
    workers: usize,
    round_work_us: i32,
    /// The host of all workers; `None` if the spawn selects their hosts.
    host: Option<&'a str>,
}

impl Default for JobStart<'_> {
    fn default() -> Self {
        JobStart {
            program: "ring_job",
            folder: "ring",
            host_option: "-h1",
            workers: WORKER_COUNT,
            round_work_us: ROUND_WORK_US,
            host: None,
        }
    }
}

impl Job {
    /// Starts a job. `place` is the option of the console's `spawn` command that selects the host
    /// of the first task.
    ///
    /// # Panics
    /// The job does not start.
    pub fn start(vm: &Vm<'_>, host_option: &str) -> Job {
        Job::start_with(
            vm,
            &JobStart {
                host_option,
                ..JobStart::default()
            },
        )
    }

    /// As [`Job::start`]. Each task computes for `pause` microseconds in a round.
    ///
    /// # Panics
    /// The job does not start.
    pub fn start_slow(vm: &Vm<'_>, place: &str, pause: i32) -> Job {
        Job::start_with(
            vm,
            &JobStart {
                host_option: place,
                round_work_us: pause,
                ..JobStart::default()
            },
        )
    }

    /// As [`Job::start`], with a job that writes to the folder `folder`.
    ///
    /// # Panics
    /// The job does not start.
    pub fn start_in_folder(vm: &Vm<'_>, folder: &str, place: &str) -> Job {
        Job::start_with(
            vm,
            &JobStart {
                host_option: place,
                folder,
                ..JobStart::default()
            },
        )
    }

    /// Starts a small job that writes to the folder `folder`. Its first task is on h1, and its only
    /// worker is on `host`.
    ///
    /// # Panics
    /// The job does not start.
    pub fn start_small(vm: &Vm<'_>, folder: &str, host: &str) -> Job {
        // A job on an earlier virtual machine may have used this folder.
        let _ = std::fs::remove_dir_all(vm.home().join(folder));
        Job::start_with(
            vm,
            &JobStart {
                folder,
                workers: 1,
                round_work_us: SMALL_JOB_ROUND_WORK_US,
                host: Some(host),
                ..JobStart::default()
            },
        )
    }

    /// As [`Job::start`], with tasks that write self-checkpoints if the environment requests them.
    ///
    /// # Panics
    /// The job does not start.
    pub fn start_with_self_checkpoints(vm: &Vm<'_>, place: &str) -> Job {
        Job::start_with(
            vm,
            &JobStart {
                program: "own_ring",
                host_option: place,
                ..JobStart::default()
            },
        )
    }

    fn start_with(vm: &Vm<'_>, start: &JobStart<'_>) -> Job {
        vm.compile_program(start.program).expect("gcc");
        let folder = make_folder(vm, start.folder);
        let (workers, pause) = (start.workers.to_string(), start.round_work_us.to_string());
        let path = folder.to_str().expect("text");
        let mut words = vec![
            start.host_option,
            start.program,
            &workers,
            ENDLESS_ROUNDS,
            &pause,
            path,
        ];
        words.extend(start.host);
        let tid = vm.spawn(&words).or_panic_with_logs(vm);
        Job {
            folder,
            workers: start.workers,
            tid,
        }
    }

    /// Returns a job that was started by other means, or that writes to another folder than at its
    /// start.
    pub fn existing(folder: PathBuf, tid: String) -> Job {
        Job {
            folder,
            workers: WORKER_COUNT,
            tid,
        }
    }

    fn line_count(&self) -> usize {
        std::fs::read_to_string(self.folder.join("log"))
            .map(|log| log.lines().count())
            .unwrap_or_default()
    }

    /// Returns all rounds that the job has computed, in the order of time. Rounds that a rollback
    /// has undone are included.
    pub fn computed_rounds(&self) -> Vec<ComputedRound> {
        let text = std::fs::read_to_string(self.folder.join("times")).unwrap_or_default();
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        let mark = |line: &str| {
            line.split_once(' ')
                .and_then(|(round, at)| Some((round.parse().ok()?, at.parse().ok()?)))
        };
        whole.lines().filter_map(mark).collect()
    }

    /// Waits until the job has computed `rounds` more rounds.
    ///
    /// # Panics
    /// The rounds are not computed within the time limit.
    pub fn wait_for_rounds(&self, vm: &Vm<'_>, rounds: usize) {
        let until = self.line_count() + rounds;
        let gone = wait_for(JOB_TIMEOUT, || {
            let lines = self.line_count();
            if lines >= until {
                Ok(())
            } else {
                Err(format!("{lines} of {until} rounds"))
            }
        });
        gone.or_panic_with_logs(vm);
    }

    /// Checks that the job's log has each line once and all lines so far are correct.
    pub fn check_log(&self) {
        let log = std::fs::read_to_string(self.folder.join("log")).expect("there");
        let whole = log.rfind('\n').map_or("", |end| &log[..end]);
        let count = whole.lines().count();
        assert_eq!(
            whole.lines().collect::<Vec<_>>(),
            expected_lines(&sums(self.workers, count as i64)),
            "{:?}",
            self.folder
        );
    }

    /// Ends the job and waits for its end. Checks that the result is correct and that the log has
    /// each line once.
    ///
    /// # Panics
    /// The job does not end, or a check fails.
    pub fn finish(&self, vm: &Vm<'_>) {
        std::fs::write(self.folder.join("last"), "").expect("written");
        let result = wait_for(JOB_TIMEOUT, || {
            let text = std::fs::read_to_string(self.folder.join("result")).unwrap_or_default();
            text.trim()
                .parse::<i64>()
                .map_err(|_| format!("no result after {} rounds", self.line_count()))
        });
        let result = result.or_panic_with_logs(vm);
        let log = std::fs::read_to_string(self.folder.join("log")).expect("there");
        let sums = sums(self.workers, log.lines().count() as i64);
        assert_eq!(Some(&result), sums.last());
        assert!(log.lines().eq(expected_lines(&sums)), "{log}");
    }
}

/// Returns the expected lines of the log.
fn expected_lines(sums: &[i64]) -> Vec<String> {
    (0..)
        .zip(sums)
        .map(|(round, sum): (i64, _)| format!("{round} {sum}"))
        .collect()
}

/// Makes the folder of a job. Returns its path.
fn make_folder(vm: &Vm<'_>, name: &str) -> PathBuf {
    let folder = vm.home().join(name);
    std::fs::create_dir_all(&folder).expect("a folder");
    std::fs::write(folder.join("times"), "").expect("written");
    // The job's user must be able to write.
    let home = std::fs::metadata(vm.home()).expect("there");
    for path in [&folder, &folder.join("times")] {
        std::os::unix::fs::chown(path, Some(home.uid()), Some(home.gid())).expect("chown");
    }
    folder
}
