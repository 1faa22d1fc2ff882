//! Samples the host's load from /proc. The files stay open and one buffer is reused, so a sample
//! allocates no memory.

use crate::cgroup::LimitingGroup;
use crate::cpu_usage::{self, CpuUsage};
use crate::proc::{self, read_from_start};
use sempa_proto::Micros;
use sempa_proto::load::LoadSample;
use std::fs::File;
use std::io;
use std::path::Path;
use std::time::Instant;

/// Maximum number of bytes that are read from a /proc file. In /proc/stat the processors come
/// first; the limit suffices for about a thousand processors.
const TEXT_BYTES_MAX: usize = 64 << 10;
/// Minimum interval of reading /proc/meminfo while no owner reserves memory. The kernel needs
/// longer to produce this file than for the rest of a sample, and the memory that matters for
/// placement does not change within seconds.
///
/// While an owner reserves memory, samples read memory and pressure alternately; the kernel updates
/// the pressure every two seconds.
pub const MEMORY_INTERVAL: Micros = Micros::from_secs(30);

/// The open files, and the state that is kept between two samples.
#[derive(Debug)]
pub struct Sampler {
    stat: File,
    /// The CPU account of all processors, which costs less to read than `stat`; `None` if it is not
    /// available. `cpu_usage` contains the times derived from it.
    cpu_account: Option<File>,
    cpu_usage: Option<CpuUsage>,
    started: Instant,
    loadavg: File,
    meminfo: File,
    pressure: Option<File>,
    /// CPU pressure as last read.
    last_pressure: f32,
    limiting_group: Option<LimitingGroup>,
    /// CPU times of the limiting control group, if there is a limit.
    group_times: Option<proc::CpuTimes>,
    text: Box<[u8]>,
    last_times: Option<proc::CpuTimes>,
    /// Available memory in bytes, with the time at which it was read.
    memory: Option<(Micros, u64)>,
    /// True if an owner reserves memory, so that memory and pressure are read alternately.
    memory_matters: bool,
    /// True if the last sample has read the available memory.
    last_sample_read_memory: bool,
}

/// Returns the error for a file that cannot be parsed.
fn parse_error(name: &str) -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        format!("{name} cannot be understood; is this Linux's /proc?"),
    )
}

fn open(path: &Path) -> io::Result<File> {
    File::open(path).map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", path.display())))
}

impl Sampler {
    /// Opens the files below `root`, which is /proc except in tests. The pressure file may be
    /// missing.
    ///
    /// # Errors
    /// One of `stat`, `loadavg`, `meminfo` cannot be opened.
    pub fn open(root: &Path) -> io::Result<Sampler> {
        Ok(Sampler {
            stat: open(&root.join("stat"))?,
            cpu_account: cpu_usage::open_root_cpu_account(&root.join("self")),
            cpu_usage: None,
            started: Instant::now(),
            loadavg: open(&root.join("loadavg"))?,
            meminfo: open(&root.join("meminfo"))?,
            pressure: open(&root.join("pressure/cpu")).ok(),
            last_pressure: 0.0,
            limiting_group: LimitingGroup::of_process(&root.join("self")),
            group_times: None,
            text: vec![0; TEXT_BYTES_MAX].into_boxed_slice(),
            last_times: None,
            memory: None,
            memory_matters: false,
            last_sample_read_memory: false,
        })
    }

    /// Makes the sampler read the available memory from another file, in the format of
    /// /proc/meminfo.
    ///
    /// # Errors
    /// The file cannot be opened.
    pub fn with_meminfo_file(mut self, path: &Path) -> io::Result<Sampler> {
        self.meminfo = open(path)?;
        Ok(self)
    }

    /// Sets how often memory is read: for every second sample, starting with the next one, if
    /// `matters` is true; otherwise at most once per [`MEMORY_INTERVAL`].
    pub fn set_memory_matters(&mut self, matters: bool) {
        if self.memory_matters != matters {
            (self.memory_matters, self.last_sample_read_memory) = (matters, false);
        }
    }

    /// Takes a sample at the time of day `at`. The share of the virtual machine's tasks
    /// (`task_cpus`) is not measured. `busy` covers the time since the previous sample; in the
    /// first sample it is estimated from the number of runnable threads. The available memory may
    /// be as old as [`MEMORY_INTERVAL`]. While memory matters, either the memory or the pressure is
    /// that of the previous sample.
    ///
    /// # Errors
    /// A file cannot be read or parsed.
    pub fn sample(&mut self, at: Micros) -> io::Result<LoadSample> {
        let (times, cores) = self.read_cpu_times()?;
        let (load1, running) = proc::loadavg(read_from_start(&self.loadavg, &mut self.text)?)
            .ok_or_else(|| parse_error("loadavg"))?;
        let available_bytes = self.read_available_bytes(at)?;
        if !(self.memory_matters && self.last_sample_read_memory) {
            self.last_pressure = self.read_pressure();
        }
        // The thread that reads the file is running, too, and does not count.
        let running = running.saturating_sub(1);
        let queue = (running as f32 / cores as f32).min(1.0);
        let busy = self
            .last_times
            .and_then(|before| times.busy_since(before))
            .unwrap_or(queue);
        self.last_times = Some(times);
        let limited = self
            .limiting_group
            .as_mut()
            .and_then(|group| group.measure(at));
        self.group_times = limited.map(|limited| limited.cpu_times(at, cores));
        if let Some(limited) = limited {
            // The other numbers in /proc describe the whole machine, not the part within the limit.
            let demand = limited.used_processors + limited.throttled_threads;
            let (busy, running) = (
                (limited.used_processors / limited.processor_limit).min(1.0),
                demand.round() as u32,
            );
            let share = limited.processor_limit.min(cores as f32);
            let (load1, pressure, ours) = (demand, 0.0, None);
            return Ok(LoadSample {
                at,
                cores,
                cpu_limit: share,
                running,
                load1,
                busy,
                available_bytes,
                cpu_pressure: pressure,
                task_cpus: ours,
            });
        }
        Ok(LoadSample {
            at,
            cores,
            cpu_limit: 0.0,
            running,
            load1,
            busy,
            available_bytes,
            cpu_pressure: self.last_pressure,
            task_cpus: None,
        })
    }

    /// Returns the CPU times of the newest sample. With a processor limit, these are the times of
    /// the limited group.
    pub fn cpu_times(&self) -> Option<proc::CpuTimes> {
        self.group_times.or(self.last_times)
    }

    /// Returns the CPU times summed over all processors, and the number of processors.
    fn read_cpu_times(&mut self) -> io::Result<(proc::CpuTimes, u32)> {
        let now = Micros(u64::try_from(self.started.elapsed().as_micros()).unwrap_or(u64::MAX));
        let parse_used =
            |file: &File| proc::group_cpu_time(read_from_start(file, &mut self.text).ok()?);
        let used = self.cpu_account.as_ref().and_then(parse_used);
        if let (Some(used), Some(tally)) = (used, &mut self.cpu_usage)
            && !tally.needs_stat(now)
        {
            return Ok(tally.update(now, used));
        }
        let (stat, cores) = proc::cpu_times(read_from_start(&self.stat, &mut self.text)?)
            .ok_or_else(|| parse_error("stat"))?;
        let Some(used) = used else {
            return Ok((stat, cores));
        };
        let tally = self
            .cpu_usage
            .get_or_insert_with(|| CpuUsage::new(now, used, stat, cores));
        Ok(tally.update_with_stat(now, used, stat, cores))
    }

    /// Returns the CPU pressure; 0 if the kernel does not measure it. If the measurement was
    /// disabled at boot, the file exists but cannot be read.
    fn read_pressure(&mut self) -> f32 {
        let parse = |file: &File| proc::cpu_pressure(read_from_start(file, &mut self.text).ok()?);
        self.pressure.as_ref().and_then(parse).unwrap_or(0.0)
    }

    fn read_available_bytes(&mut self, at: Micros) -> io::Result<u64> {
        // `abs_diff` is used because the time of day may be set back.
        let is_fresh = |read: Micros| match self.memory_matters {
            true => self.last_sample_read_memory,
            false => at.0.abs_diff(read.0) < MEMORY_INTERVAL.0,
        };
        self.last_sample_read_memory = !self.memory.is_some_and(|(read, _)| is_fresh(read));
        if let Some((_, bytes)) = self.memory.filter(|_| !self.last_sample_read_memory) {
            return Ok(bytes);
        }
        let text = read_from_start(&self.meminfo, &mut self.text)?;
        let bytes = proc::available_bytes(text).ok_or_else(|| parse_error("meminfo"))?;
        self.memory = Some((at, bytes));
        Ok(bytes)
    }
}
