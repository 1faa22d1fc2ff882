//! Reads job files, which contain settings for the spawns of one program. [`read`] reads a file by
//! name; [`from_process_env`] reads the file that the environment names, once per process.

use crate::error::Error;
use sempa_proto::PvmError;
use sempa_proto::job::{JOB_ENV, JOB_FILE_BYTES_MAX, JobFile};
use sempa_proto::task::SpawnRequest;
use std::ffi::OsString;
use std::io::Read;
use std::path::Path;
use std::sync::OnceLock;

/// Reads and parses a job file.
///
/// # Errors
/// The file cannot be read, or its content is invalid; the error then names file, line and reason.
pub fn read(path: &Path) -> Result<JobFile, Error> {
    let invalid_file_error = |reason: String| Error::new(PvmError::BadParam, reason);
    let mut text = String::new();
    let file = std::fs::File::open(path);
    file.and_then(|file| {
        file.take(JOB_FILE_BYTES_MAX as u64 + 1)
            .read_to_string(&mut text)
    })
    .map_err(|error| {
        invalid_file_error(format!(
            "the job file {} cannot be read: {error}; nothing is started",
            path.display()
        ))
    })?;
    JobFile::parse(&path.display().to_string(), &text)
        .map_err(|error| invalid_file_error(error.to_string()))
}

/// Returns the job file that the environment variable [`JOB_ENV`] names; `None` if the variable is
/// unset or empty. The first call reads the file; all later calls in the process return the same
/// result.
///
/// # Errors
/// Those of [`read`].
pub fn from_process_env() -> Result<Option<&'static JobFile>, &'static Error> {
    static JOB: OnceLock<Option<Result<JobFile, Error>>> = OnceLock::new();
    JOB.get_or_init(|| read_env_value(std::env::var_os(JOB_ENV)))
        .as_ref()
        .map(Result::as_ref)
        .transpose()
}

fn read_env_value(value: Option<OsString>) -> Option<Result<JobFile, Error>> {
    value
        .filter(|value| !value.is_empty())
        .map(|value| read(Path::new(&value)))
}

/// Adds the job file's settings to a spawn request, if the job file has settings for the requested
/// program.
///
/// # Errors
/// Those of [`read`].
pub(crate) fn apply_to_request(
    job_file: Result<Option<&JobFile>, &Error>,
    request: &mut SpawnRequest,
) -> Result<(), Error> {
    if let Some(job_file) = job_file
        .map_err(Error::clone)?
        .filter(|job_file| job_file.applies_to(&request.program))
    {
        job_file.apply_to(request);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The job file in the environment applies to spawns of its program only. An invalid or missing
    /// file makes every spawn fail.
    #[test]
    fn job_file_applies_to_its_program_only() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("job.toml");
        std::fs::write(&path, "program = \"worker\"\nwants = \"cores >= 4\"\n")
            .expect("it can be written");
        let job_result = read_env_value(Some(path.clone().into()));
        let spawn_env = |job_result: &Option<Result<JobFile, Error>>, file: &str| {
            let mut request = SpawnRequest {
                program: file.into(),
                ..SpawnRequest::default()
            };
            let job_result = job_result.as_ref().map(Result::as_ref).transpose();
            apply_to_request(job_result, &mut request).map(|()| request.env)
        };
        assert_eq!(
            spawn_env(&job_result, "worker"),
            Ok(vec![b"SEMPA_WANTS=cores >= 4".to_vec()])
        );
        assert_eq!(spawn_env(&job_result, "other"), Ok(Vec::new()));
        for empty_value in [None, Some(OsString::new())] {
            assert_eq!(
                spawn_env(&read_env_value(empty_value), "worker"),
                Ok(Vec::new())
            );
        }
        std::fs::write(&path, "program = \"worker\"\nwant = \"cores >= 4\"\n")
            .expect("it can be written");
        let error = spawn_env(&read_env_value(Some(path.clone().into())), "other")
            .expect_err("no such word");
        assert_eq!(error.code, PvmError::BadParam);
        assert!(
            error
                .reason
                .contains("job.toml, line 2: unknown field `want`"),
            "{error}"
        );
        std::fs::remove_file(&path).expect("it is there");
        let error =
            spawn_env(&read_env_value(Some(path.into())), "worker").expect_err("no such file");
        assert!(
            error.reason.contains("job.toml cannot be read: "),
            "{error}"
        );
    }
}
