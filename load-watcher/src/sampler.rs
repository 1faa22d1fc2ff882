//! Samples the host's load from /proc. The files stay open and one buffer is reused, so a sample
//! allocates no memory.

use crate::cgroup::LimitingGroup;
use crate::cpu_usage::{self, CpuUsage};
use crate::proc::{self, read_from_start};
use sempa_proto::Micros;
use sempa_proto::load::LoadSample;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Maximum number of bytes that are read from a /proc file. /proc/stat begins with the lines of the
/// processors, so the limit suffices for about a thousand processors.
const PROC_FILE_BYTES_MAX: usize = 64 << 10;
/// Maximum age of the available memory in a sample while no owner reserves memory. Memory is read
/// rarely, because the kernel needs longer to produce /proc/meminfo than all other files of a
/// sample, and the memory that matters for placement does not change within seconds.
///
/// While an owner reserves memory, samples read memory and pressure alternately; the kernel updates
/// the pressure every two seconds.
pub const MEMORY_AGE_MAX: Micros = Micros::from_secs(30);

/// The open files, and the state that is kept between two samples.
#[derive(Debug)]
pub struct Sampler {
    stat: File,
    /// The CPU account of all processors, which costs less to read than `stat`; `None` if there is
    /// no readable account.
    cpu_account: Option<File>,
    /// CPU times derived from `cpu_account`; `None` until `cpu_account` and `stat` were both read.
    cpu_usage: Option<CpuUsage>,
    started_at: Instant,
    loadavg: File,
    meminfo: File,
    pressure: Option<File>,
    /// CPU pressure at its last reading, as a share from 0 to 1.
    last_pressure: f32,
    /// Directory of this process in /proc.
    process_dir: PathBuf,
    limiting_group: Option<LimitingGroup>,
    /// True if the CPU times of the last sample and of the sample before describe different groups
    /// of processes.
    cpu_times_restarted: bool,
    /// CPU times of the limiting control group at the last sample; `None` if there is no limit.
    group_times: Option<proc::CpuTimes>,
    buffer: Box<[u8]>,
    last_cpu_times: Option<proc::CpuTimes>,
    /// Time of day of the last reading of the available memory, and the available memory in bytes.
    available_memory: Option<(Micros, u64)>,
    /// True if an owner reserves memory. Samples then read memory and pressure alternately.
    memory_matters: bool,
    /// True if the last sample has read the available memory.
    last_sample_read_memory: bool,
}

/// Returns the error for the file `name` that cannot be parsed.
fn parse_error(name: &str) -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        format!("{name} cannot be parsed; is this Linux's /proc?"),
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
    pub fn open(root: &Path) -> io::Result<Self> {
        let process_dir = root.join("self");
        Ok(Self {
            stat: open(&root.join("stat"))?,
            cpu_account: cpu_usage::open_root_cpu_account(&process_dir),
            cpu_usage: None,
            started_at: Instant::now(),
            loadavg: open(&root.join("loadavg"))?,
            meminfo: open(&root.join("meminfo"))?,
            pressure: open(&root.join("pressure/cpu")).ok(),
            last_pressure: 0.0,
            limiting_group: LimitingGroup::of_process(&process_dir),
            process_dir,
            cpu_times_restarted: false,
            group_times: None,
            buffer: vec![0; PROC_FILE_BYTES_MAX].into_boxed_slice(),
            last_cpu_times: None,
            available_memory: None,
            memory_matters: false,
            last_sample_read_memory: false,
        })
    }

    /// Makes the sampler read the available memory from another file, in the format of
    /// /proc/meminfo.
    ///
    /// # Errors
    /// The file cannot be opened.
    pub fn with_meminfo_file(mut self, path: &Path) -> io::Result<Self> {
        self.meminfo = open(path)?;
        Ok(self)
    }

    /// Sets how often the available memory is read. If `matters` is true, the memory is read in
    /// every second sample, starting with the next sample. Otherwise the memory is read when the
    /// last reading is older than [`MEMORY_AGE_MAX`].
    pub fn set_memory_matters(&mut self, matters: bool) {
        if self.memory_matters != matters {
            (self.memory_matters, self.last_sample_read_memory) = (matters, false);
        }
    }

    /// Takes a sample at the time of day `at`. With a processor limit, the sample describes the
    /// control group, otherwise the machine. `task_cpus`, the use by the virtual machine's tasks,
    /// is not measured. `busy_share` covers the time since the previous sample; in the first sample
    /// it is estimated from the number of runnable threads. The available memory may be as old as
    /// [`MEMORY_AGE_MAX`]. While memory matters, each sample reads either the memory or the
    /// pressure, and takes the other value from the previous sample.
    ///
    /// # Errors
    /// A file cannot be read or parsed.
    pub fn sample(&mut self, at: Micros) -> io::Result<LoadSample> {
        let (times, cores) = self.read_cpu_times()?;
        let (one_minute_load, runnable_count) =
            proc::parse_loadavg(read_from_start(&self.loadavg, &mut self.buffer)?)
                .ok_or_else(|| parse_error("loadavg"))?;
        let available_bytes = self.read_available_bytes(at)?;
        if !(self.memory_matters && self.last_sample_read_memory) {
            self.last_pressure = self.read_pressure();
        }
        // The thread that reads the file is itself runnable and is not counted.
        let other_runnable_count = runnable_count.saturating_sub(1);
        let runnable_share = (other_runnable_count as f32 / cores as f32).min(1.0);
        let busy_share = self
            .last_cpu_times
            .and_then(|previous_times| times.busy_since(previous_times))
            .unwrap_or(runnable_share);
        self.last_cpu_times = Some(times);
        let limit_usage = self
            .limiting_group
            .as_mut()
            .and_then(|group| group.measure(at));
        self.cpu_times_restarted |= self.group_times.is_some() != limit_usage.is_some();
        self.group_times = limit_usage.map(|limit_usage| limit_usage.cpu_times(at, cores));
        if let Some(limit_usage) = limit_usage {
            // All other numbers in /proc describe the whole machine. Only the control group
            // describes the processors that this host may use.
            let demand_processors = limit_usage.used_processors + limit_usage.throttled_threads;
            let (busy_share, runnable_count) = (
                (limit_usage.used_processors / limit_usage.processor_limit).min(1.0),
                demand_processors.round() as u32,
            );
            let processor_limit = limit_usage.processor_limit.min(cores as f32);
            let (one_minute_load, cpu_pressure, task_processors) = (demand_processors, 0.0, None);
            return Ok(LoadSample {
                at,
                cores,
                cpu_limit: processor_limit,
                runnable_threads: runnable_count,
                one_minute_load,
                busy_share,
                available_bytes,
                cpu_pressure,
                task_cpus: task_processors,
            });
        }
        Ok(LoadSample {
            at,
            cores,
            cpu_limit: 0.0,
            runnable_threads: other_runnable_count,
            one_minute_load,
            busy_share,
            available_bytes,
            cpu_pressure: self.last_pressure,
            task_cpus: None,
        })
    }

    /// Selects the limiting control group again, because this process may have been moved to
    /// another group, and a limit may have been set or removed. The selection allocates memory.
    pub fn select_limiting_group(&mut self) {
        let selected_group = LimitingGroup::of_process(&self.process_dir);
        let (old_dir, new_dir) = (
            self.limiting_group.as_ref().map(LimitingGroup::dir),
            selected_group.as_ref().map(LimitingGroup::dir),
        );
        if old_dir != new_dir {
            self.cpu_times_restarted = true;
            self.limiting_group = selected_group;
        }
    }

    /// Returns true if the CPU times since the last call of this function began to describe another
    /// group of processes, so that earlier CPU times cannot be compared with the newest ones.
    pub fn take_cpu_times_restart(&mut self) -> bool {
        std::mem::take(&mut self.cpu_times_restarted)
    }

    /// Returns the CPU times of the newest sample; `None` before the first sample. With a processor
    /// limit, these are the times of the limiting control group.
    pub fn cpu_times(&self) -> Option<proc::CpuTimes> {
        self.group_times.or(self.last_cpu_times)
    }

    /// Returns the CPU times summed over all processors, and the number of processors. Reads the
    /// CPU account, and /proc/stat if the account does not suffice.
    fn read_cpu_times(&mut self) -> io::Result<(proc::CpuTimes, u32)> {
        let now = Micros(u64::try_from(self.started_at.elapsed().as_micros()).unwrap_or(u64::MAX));
        let read_used_us =
            |file: &File| proc::group_cpu_time_us(read_from_start(file, &mut self.buffer).ok()?);
        let account_us = self.cpu_account.as_ref().and_then(read_used_us);
        if let (Some(account_us), Some(cpu_usage)) = (account_us, &mut self.cpu_usage)
            && !cpu_usage.needs_stat(now)
        {
            return Ok(cpu_usage.update(now, account_us));
        }
        let (stat, cores) = proc::parse_cpu_times(read_from_start(&self.stat, &mut self.buffer)?)
            .ok_or_else(|| parse_error("stat"))?;
        let Some(account_us) = account_us else {
            return Ok((stat, cores));
        };
        let cpu_usage = self
            .cpu_usage
            .get_or_insert_with(|| CpuUsage::new(now, account_us, stat, cores));
        Ok(cpu_usage.update_with_stat(now, account_us, stat, cores))
    }

    /// Returns the CPU pressure as a share from 0 to 1; 0 if the kernel does not measure the
    /// pressure. If the measurement was disabled at boot, the file exists but cannot be read.
    fn read_pressure(&mut self) -> f32 {
        let read_pressure_share =
            |file: &File| proc::parse_cpu_pressure(read_from_start(file, &mut self.buffer).ok()?);
        self.pressure
            .as_ref()
            .and_then(read_pressure_share)
            .unwrap_or(0.0)
    }

    /// Returns the available memory in bytes at the time of day `at`. If the last reading is recent
    /// enough, returns the value of that reading instead.
    fn read_available_bytes(&mut self, at: Micros) -> io::Result<u64> {
        // The difference is absolute because the time of day may be set back.
        let reading_is_recent = |read_at: Micros| match self.memory_matters {
            true => self.last_sample_read_memory,
            false => at.0.abs_diff(read_at.0) < MEMORY_AGE_MAX.0,
        };
        self.last_sample_read_memory = !self
            .available_memory
            .is_some_and(|(read_at, _)| reading_is_recent(read_at));
        if let Some((_, bytes)) = self
            .available_memory
            .filter(|_| !self.last_sample_read_memory)
        {
            return Ok(bytes);
        }
        let text = read_from_start(&self.meminfo, &mut self.buffer)?;
        let bytes = proc::parse_available_bytes(text).ok_or_else(|| parse_error("meminfo"))?;
        self.available_memory = Some((at, bytes));
        Ok(bytes)
    }
}
