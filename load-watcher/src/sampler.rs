//! Takes samples of the host's load from /proc, on descriptors that stay open and into one buffer: a sample allocates
//! nothing.

use crate::cgroup::Group;
use crate::proc::{self, read};
use crate::usage::{self, Tally};
use sempa_proto::Micros;
use sempa_proto::load::LoadSample;
use std::fs::File;
use std::io;
use std::path::Path;
use std::time::Instant;

/// Bytes of a /proc file that are looked at. In /proc/stat the processors come first; this is enough for about a
/// thousand.
const TEXT_BYTES_MAX: usize = 64 << 10;
/// Where nobody keeps memory free, /proc/meminfo is read no more often than this: gathering it takes the kernel longer than all the
/// rest of a sample, and memory that matters to placement does not come and go in seconds. Where somebody does, it is read for every
/// second sample, and the pressure for the others, which the kernel works out anew every two seconds.
pub const MEMORY_SPAN: Micros = Micros::from_secs(30);

/// The open files and what the last sample needs to be remembered by.
#[derive(Debug)]
pub struct Sampler {
    stat: File,
    /// What all processors have used, for less than `stat` costs; and what is made of it.
    account: Option<File>,
    tally: Option<Tally>,
    begun: Instant,
    loadavg: File,
    meminfo: File,
    pressure: Option<File>,
    /// What it said last.
    pressed: f32,
    group: Option<Group>,
    /// The times of the group, if it is limited.
    of_group: Option<proc::CpuTimes>,
    text: Box<[u8]>,
    before: Option<proc::CpuTimes>,
    /// Memory that could be had, and when that was read.
    memory: Option<(Micros, u64)>,
    /// An owner keeps memory free: it is read in turn with the pressure.
    memory_matters: bool,
    /// The last sample has read it.
    memory_read: bool,
}

/// A file says something that is not understood.
fn strange(name: &str) -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        format!("{name} cannot be understood; is this Linux's /proc?"),
    )
}

fn open(path: &Path) -> io::Result<File> {
    File::open(path).map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", path.display())))
}

impl Sampler {
    /// Opens the files below `root`, which is /proc but in tests. Kernels without pressure information are fine.
    ///
    /// # Errors
    /// When one of `stat`, `loadavg`, `meminfo` cannot be opened.
    pub fn open(root: &Path) -> io::Result<Sampler> {
        Ok(Sampler {
            stat: open(&root.join("stat"))?,
            account: usage::account(&root.join("self")),
            tally: None,
            begun: Instant::now(),
            loadavg: open(&root.join("loadavg"))?,
            meminfo: open(&root.join("meminfo"))?,
            pressure: open(&root.join("pressure/cpu")).ok(),
            pressed: 0.0,
            group: Group::of(&root.join("self")),
            of_group: None,
            text: vec![0; TEXT_BYTES_MAX].into_boxed_slice(),
            before: None,
            memory: None,
            memory_matters: false,
            memory_read: false,
        })
    }

    /// Reads what memory there is from another file than /proc/meminfo, of the same form.
    ///
    /// # Errors
    /// When it cannot be opened.
    pub fn memory_from(mut self, path: &Path) -> io::Result<Sampler> {
        self.meminfo = open(path)?;
        Ok(self)
    }

    /// From now on memory is read for every second sample, the next one first, or no more often than [`MEMORY_SPAN`].
    pub fn memory_matters(&mut self, matters: bool) {
        if self.memory_matters != matters {
            (self.memory_matters, self.memory_read) = (matters, false);
        }
    }

    /// A sample, taken at `at` (time of day), that does not say whose the load is. `busy` is what was used since the sample before; the first one says what
    /// the queue says. Memory may be as old as [`MEMORY_SPAN`]; if it matters, it or the pressure is as old as the sample before.
    ///
    /// # Errors
    /// When a file cannot be read or understood.
    pub fn sample(&mut self, at: Micros) -> io::Result<LoadSample> {
        let (times, cores) = self.processors()?;
        let (load1, running) = proc::loadavg(read(&self.loadavg, &mut self.text)?)
            .ok_or_else(|| strange("loadavg"))?;
        let available_bytes = self.available_bytes(at)?;
        if !(self.memory_matters && self.memory_read) {
            self.pressed = self.pressure();
        }
        // The thread that reads is running itself.
        let running = running.saturating_sub(1);
        let queue = (running as f32 / cores as f32).min(1.0);
        let busy = self
            .before
            .and_then(|before| times.busy_since(before))
            .unwrap_or(queue);
        self.before = Some(times);
        let limited = self.group.as_mut().and_then(|group| group.measure(at));
        self.of_group = limited.map(|limited| limited.times(at, cores));
        if let Some(limited) = limited {
            // Everything else that /proc tells is about the whole machine.
            let demand = limited.used + limited.held;
            let (busy, running) = (
                (limited.used / limited.share).min(1.0),
                demand.round() as u32,
            );
            let share = limited.share.min(cores as f32);
            let (load1, pressure, ours) = (demand, 0.0, None);
            return Ok(LoadSample {
                at,
                cores,
                share,
                running,
                load1,
                busy,
                available_bytes,
                pressure,
                ours,
            });
        }
        Ok(LoadSample {
            at,
            cores,
            share: 0.0,
            running,
            load1,
            busy,
            available_bytes,
            pressure: self.pressed,
            ours: None,
        })
    }

    /// Processor times as of the newest sample; with a limit, of what it limits.
    pub fn times(&self) -> Option<proc::CpuTimes> {
        self.of_group.or(self.before)
    }

    /// Times of all processors together, and how many there are.
    fn processors(&mut self) -> io::Result<(proc::CpuTimes, u32)> {
        let now = Micros(u64::try_from(self.begun.elapsed().as_micros()).unwrap_or(u64::MAX));
        let says = |file: &File| proc::group_used(read(file, &mut self.text).ok()?);
        let used = self.account.as_ref().and_then(says);
        if let (Some(used), Some(tally)) = (used, &mut self.tally)
            && !tally.must_look(now)
        {
            return Ok(tally.step(now, used));
        }
        let (stat, cores) =
            proc::stat(read(&self.stat, &mut self.text)?).ok_or_else(|| strange("stat"))?;
        let Some(used) = used else {
            return Ok((stat, cores));
        };
        let tally = self
            .tally
            .get_or_insert_with(|| Tally::new(now, used, stat, cores));
        Ok(tally.look(now, used, stat, cores))
    }

    /// Nothing where the kernel does not measure it; if it was switched off at boot, the file is there and cannot be read.
    fn pressure(&mut self) -> f32 {
        let says = |file: &File| proc::pressure(read(file, &mut self.text).ok()?);
        self.pressure.as_ref().and_then(says).unwrap_or(0.0)
    }

    fn available_bytes(&mut self, at: Micros) -> io::Result<u64> {
        // The time of day may be set back.
        let counts = |read: Micros| match self.memory_matters {
            true => self.memory_read,
            false => at.0.abs_diff(read.0) < MEMORY_SPAN.0,
        };
        self.memory_read = !self.memory.is_some_and(|(read, _)| counts(read));
        if let Some((_, bytes)) = self.memory.filter(|_| !self.memory_read) {
            return Ok(bytes);
        }
        let text = read(&self.meminfo, &mut self.text)?;
        let bytes = proc::available_bytes(text).ok_or_else(|| strange("meminfo"))?;
        self.memory = Some((at, bytes));
        Ok(bytes)
    }
}
