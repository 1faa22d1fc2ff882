//! A job that computes in a ring (`tests/programs/ring_job.c`, and `own_ring.c`, whose tasks write their own checkpoints), and whose
//! every line is known beforehand.

use crate::run::eventually;
use crate::vm::{Sure, Vm};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::Duration;

/// Time for anything of a whole job, on a machine that has little left for it.
const LONG: Duration = Duration::from_secs(900);
/// Its tasks but the first one.
pub const WORKERS: usize = 4;
const MODULUS: i64 = 1_000_003;
/// Microseconds for which each task computes in a round.
const PAUSE: u32 = 2000;
/// Microseconds for which each task of a small job sleeps in a round.
const NAP: u32 = 10_000;
/// Rounds that no job comes to.
const ENDLESS: &str = "100000000";

/// The sums that a job with so many workers has to write, one for each round.
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

/// A job that computes, and the folder that it writes to.
#[derive(Debug)]
pub struct Job {
    /// With its log and its result.
    pub folder: PathBuf,
    workers: usize,
    /// None: until it is told to end.
    rounds: Option<i64>,
    /// Its first task.
    pub tid: String,
}

/// A round that the job has computed, and when, in microseconds since 1970.
pub type Mark = (i64, u64);

impl Job {
    /// Starts one of so many rounds.
    ///
    /// # Panics
    /// It does not start.
    pub fn start(vm: &Vm<'_>, place: &str, rounds: i64) -> Job {
        Job::start_slow(vm, place, rounds, PAUSE)
    }

    /// The same, each of whose tasks computes for so many microseconds in a round.
    ///
    /// # Panics
    /// It does not start.
    pub fn start_slow(vm: &Vm<'_>, place: &str, rounds: i64, pause: u32) -> Job {
        Job::start_program(vm, "ring_job", "ring", place, rounds, pause)
    }

    /// One beside another, which writes to a folder of this name.
    ///
    /// # Panics
    /// It does not start.
    pub fn start_beside(vm: &Vm<'_>, folder: &str, place: &str, rounds: i64) -> Job {
        Job::start_program(vm, "ring_job", folder, place, rounds, PAUSE)
    }

    /// One that goes on until it is told to end, and writes to a folder of this name: its first task on h1, and one worker on a host.
    /// Each sleeps for a while in a round and does not compute, so that there may be many of them.
    ///
    /// # Panics
    /// It does not start.
    pub fn start_small(vm: &Vm<'_>, folder: &str, host: &str) -> Job {
        // Another virtual machine may have had one of this name.
        let _ = std::fs::remove_dir_all(vm.home().join(folder));
        let folder = folder_of(vm, folder);
        let pause = format!("-{NAP}");
        let words = [
            "-h1",
            "ring_job",
            "1",
            ENDLESS,
            &pause,
            folder.to_str().expect("text"),
            host,
        ];
        let tid = vm.spawn(&words).sure(vm);
        Job {
            folder,
            workers: 1,
            rounds: None,
            tid,
        }
    }

    /// One whose tasks write their own checkpoints, if its spawn says so.
    ///
    /// # Panics
    /// It does not start.
    pub fn start_own(vm: &Vm<'_>, place: &str, rounds: i64) -> Job {
        Job::start_program(vm, "own_ring", "ring", place, rounds, PAUSE)
    }

    fn start_program(
        vm: &Vm<'_>,
        program: &str,
        folder: &str,
        place: &str,
        rounds: i64,
        pause: u32,
    ) -> Job {
        vm.program(program).expect("gcc");
        let folder = folder_of(vm, folder);
        let (workers, count, pause) = (WORKERS.to_string(), rounds.to_string(), pause.to_string());
        let words = [
            place,
            program,
            &workers,
            &count,
            &pause,
            folder.to_str().expect("text"),
        ];
        let tid = vm.spawn(&words).sure(vm);
        Job {
            folder,
            workers: WORKERS,
            rounds: Some(rounds),
            tid,
        }
    }

    /// One that was started otherwise, or writes elsewhere by now.
    pub fn at(folder: PathBuf, rounds: i64, tid: String) -> Job {
        Job {
            folder,
            workers: WORKERS,
            rounds: Some(rounds),
            tid,
        }
    }

    fn lines(&self) -> usize {
        std::fs::read_to_string(self.folder.join("log"))
            .map(|log| log.lines().count())
            .unwrap_or_default()
    }

    /// Every round that it has computed, those too that were lost afterwards, in the order in which that was.
    pub fn marks(&self) -> Vec<Mark> {
        let text = std::fs::read_to_string(self.folder.join("times")).unwrap_or_default();
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        let mark = |line: &str| {
            line.split_once(' ')
                .and_then(|(round, at)| Some((round.parse().ok()?, at.parse().ok()?)))
        };
        whole.lines().filter_map(mark).collect()
    }

    /// Waits until the job has got this many rounds further than it is now.
    ///
    /// # Panics
    /// It does not.
    pub fn go_on(&self, vm: &Vm<'_>, rounds: usize) {
        let until = self.lines() + rounds;
        let gone = eventually(LONG, || {
            let lines = self.lines();
            if lines >= until {
                Ok(())
            } else {
                Err(format!("{lines} of {until} rounds"))
            }
        });
        gone.sure(vm);
    }

    /// What the job has written so far is right, and each line of the log is there once.
    ///
    /// # Panics
    /// Something is wrong.
    pub fn is_right(&self) {
        let log = std::fs::read_to_string(self.folder.join("log")).expect("there");
        let whole = log.rfind('\n').map_or("", |end| &log[..end]);
        let count = whole.lines().count();
        assert_eq!(
            whole.lines().collect::<Vec<_>>(),
            wanted(&sums(self.workers, count as i64)),
            "{:?}",
            self.folder
        );
    }

    /// Waits for the end, and tells the job to come to it if it does not by itself: the result is right, and each line of the log is
    /// there once.
    ///
    /// # Panics
    /// It does not come, or something is wrong.
    pub fn finish(&self, vm: &Vm<'_>) {
        if self.rounds.is_none() {
            std::fs::write(self.folder.join("last"), "").expect("written");
        }
        let result = eventually(LONG, || {
            let text = std::fs::read_to_string(self.folder.join("result")).unwrap_or_default();
            text.trim()
                .parse::<i64>()
                .map_err(|_| format!("no result after {} rounds", self.lines()))
        });
        let result = result.sure(vm);
        let log = std::fs::read_to_string(self.folder.join("log")).expect("there");
        let sums = sums(
            self.workers,
            self.rounds.unwrap_or(log.lines().count() as i64),
        );
        assert_eq!(Some(&result), sums.last());
        assert!(log.lines().eq(wanted(&sums)), "{log}");
    }
}

/// The lines of the log.
fn wanted(sums: &[i64]) -> Vec<String> {
    (0..)
        .zip(sums)
        .map(|(round, sum): (i64, _)| format!("{round} {sum}"))
        .collect()
}

/// A folder for a job.
fn folder_of(vm: &Vm<'_>, name: &str) -> PathBuf {
    let folder = vm.home().join(name);
    std::fs::create_dir_all(&folder).expect("a folder");
    std::fs::write(folder.join("times"), "").expect("written");
    // Whoever makes it, it is the user's.
    let home = std::fs::metadata(vm.home()).expect("there");
    for path in [&folder, &folder.join("times")] {
        std::os::unix::fs::chown(path, Some(home.uid()), Some(home.gid())).expect("his");
    }
    folder
}
