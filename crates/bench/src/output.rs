//! Output of results: the table to standard output, the JSON to a file or to standard output. Both hold the rows
//! measured so far.

use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::BenchError;
use crate::report::ResultRow;

/// A file is rewritten after this many times the duration of its last write: writing takes at most a percent of the
/// time.
const WRITE_EVERY: u32 = 100;

/// The JSON of all rows: an array.
#[derive(Debug)]
pub(crate) struct JsonOutput {
    place: Place,
    /// Error of the last write.
    failure: Option<io::Error>,
}

#[derive(Debug)]
enum Place {
    /// `--json` was not given.
    Nowhere,
    /// Standard output: rows that are complete, as they come.
    Stdout { rows: usize },
    /// A file that is replaced: the old content stays until there are rows.
    File {
        path: PathBuf,
        /// When it is written again at the earliest.
        next: Instant,
    },
    /// A pipe or a device: written once, at the end.
    Stream(PathBuf),
}

impl JsonOutput {
    /// Checks that `path` can be written. Does not change it.
    ///
    /// # Errors
    /// [`BenchError::Usage`], with what was found.
    pub(crate) fn open(path: Option<&Path>) -> Result<JsonOutput, BenchError> {
        let place = match path {
            None => Place::Nowhere,
            Some(path) if is_standard_output(path) => Place::Stdout { rows: 0 },
            Some(path) => check(path).map_err(|error| {
                let found = format!("{} ({error})", path.display());
                BenchError::option("json", found, "a file that can be written, in a folder that can be written")
            })?,
        };
        Ok(JsonOutput { place, failure: None })
    }

    /// Writes the table to standard output, or to standard error if standard output has the JSON.
    ///
    /// # Errors
    /// When it cannot be written. A closed pipe is no error.
    pub(crate) fn write_table(&self, text: &str) -> Result<(), BenchError> {
        const WHAT: &str = "the table on standard output";
        match self.place {
            Place::Stdout { .. } => write_text(io::stderr(), WHAT, text),
            _ => write_text(io::stdout(), WHAT, text),
        }
    }

    /// Writes the rows so far. `complete`: final ones; `current`: those with runs outstanding. A failure is reported
    /// once, and retried later.
    pub(crate) fn update(&mut self, complete: &[Vec<ResultRow>], current: &[ResultRow]) {
        let result = match &mut self.place {
            Place::Nowhere | Place::Stream(_) => Ok(()),
            Place::Stdout { rows } => append(&mut io::stdout(), rows, complete),
            Place::File { next, .. } if Instant::now() < *next => Ok(()),
            Place::File { path, next } => {
                let start = Instant::now();
                let all = complete.iter().flatten().chain(current);
                let result = replace(path, |file| write_array(file, all));
                *next = Instant::now() + start.elapsed() * WRITE_EVERY;
                result
            }
        };
        if let (Err(error), None) = (&result, &self.failure) {
            // Standard error may be closed.
            let _ = writeln!(io::stderr(), "mqblk: bench: {}; trying again", self.told(error));
        }
        self.failure = result.err();
    }

    /// Writes all rows.
    ///
    /// # Errors
    /// When they cannot be written. The file's old content remains.
    pub(crate) fn finish(&mut self, rows: &[Vec<ResultRow>]) -> Result<(), BenchError> {
        let all = rows.iter().flatten();
        let result = match &mut self.place {
            Place::Nowhere => Ok(()),
            Place::Stdout { rows: written } => {
                let mut stdout = io::stdout();
                append(&mut stdout, written, rows).and_then(|()| close(&mut stdout, *written))
            }
            // Nothing new: the older results stay.
            Place::File { .. } | Place::Stream(_) if rows.iter().all(Vec::is_empty) => Ok(()),
            Place::File { path, .. } => replace(path, |file| {
                write_array(file, all)?;
                file.sync_all()
            }),
            Place::Stream(path) => {
                OpenOptions::new().write(true).open(path).and_then(|mut file| write_array(&mut file, all))
            }
        };
        result.map_err(|error| BenchError::Failed(self.told(&error)))
    }

    fn told(&self, error: &io::Error) -> String {
        match &self.place {
            Place::File { path, .. } => format!("--json {}: {error}; its old content is unchanged", path.display()),
            Place::Stream(path) => format!("--json {}: {error}", path.display()),
            Place::Nowhere | Place::Stdout { .. } => format!("--json -: standard output: {error}"),
        }
    }
}

/// Returns true if the value of `--json` is standard output.
pub(crate) fn is_standard_output(path: &Path) -> bool {
    path.as_os_str() == "-"
}

/// Writes a text for people to `out`. A closed pipe is no error.
///
/// # Errors
/// When it cannot be written; `what` says what.
pub(crate) fn write_text(mut out: impl Write, what: &str, text: &str) -> Result<(), BenchError> {
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(BenchError::failed(what, error)),
        _ => Ok(()),
    }
}

/// Decides how `path` is written, and checks that as far as possible.
fn check(path: &Path) -> io::Result<Place> {
    let path = match path.canonicalize() {
        // The file that a link names is replaced, not the link.
        Ok(real) => real,
        Err(error) if error.kind() == io::ErrorKind::NotFound => path.to_path_buf(),
        Err(error) => return Err(error),
    };
    match path.metadata() {
        Ok(found) if found.is_dir() => Err(io::Error::from(io::ErrorKind::IsADirectory)),
        Ok(found) if !found.file_type().is_file() => {
            // Opening a pipe waits for its reader, and closing it would end the reader.
            if !found.file_type().is_fifo() {
                OpenOptions::new().write(true).open(&path)?;
            }
            Ok(Place::Stream(path))
        }
        found => {
            if found.is_ok() {
                OpenOptions::new().write(true).open(&path)?;
            }
            temporary(&path)?;
            Ok(Place::File { path, next: Instant::now() })
        }
    }
}

/// Makes a file beside `path`.
///
/// # Errors
/// When the folder cannot be written.
pub(crate) fn temporary(path: &Path) -> io::Result<tempfile::NamedTempFile> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // The mode of a new file, with the umask applied. An existing file keeps its mode.
    let mode = path.metadata().map_or(0o666, |found| found.permissions().mode());
    tempfile::Builder::new().prefix(".mqblk-bench.").permissions(Permissions::from_mode(mode)).tempfile_in(folder)
}

/// Replaces the file at `path` by one that `write` has written completely.
///
/// # Errors
/// When it cannot be written. The old file remains.
pub(crate) fn replace(path: &Path, write: impl FnOnce(&mut File) -> io::Result<()>) -> io::Result<()> {
    let mut file = temporary(path)?;
    write(file.as_file_mut())?;
    file.persist(path)?;
    Ok(())
}

fn write_array<'a>(file: &mut File, rows: impl Iterator<Item = &'a ResultRow>) -> io::Result<()> {
    let mut out = BufWriter::new(file);
    let rows: Vec<&ResultRow> = rows.collect();
    serde_json::to_writer_pretty(&mut out, &rows)?;
    out.write_all(b"\n")?;
    out.flush()
}

/// Appends the rows of an array after the first `written`.
fn append(out: &mut impl Write, written: &mut usize, groups: &[Vec<ResultRow>]) -> io::Result<()> {
    for row in groups.iter().flatten().skip(*written) {
        let text = serde_json::to_string_pretty(row)?;
        let indented = text.replace('\n', "\n  ");
        write!(out, "{}\n  {indented}", if *written == 0 { "[" } else { "," })?;
        *written += 1;
    }
    out.flush()
}

/// Ends an array of `written` rows.
fn close(out: &mut impl Write, written: usize) -> io::Result<()> {
    out.write_all(if written == 0 { b"[]\n" } else { b"\n]\n" })?;
    out.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(names: &[&str]) -> Vec<Vec<ResultRow>> {
        names.iter().map(|name| vec![ResultRow::example(4096, name, 1e3)]).collect()
    }

    fn columns(text: &str) -> Vec<String> {
        let value: serde_json::Value = serde_json::from_str(text).unwrap();
        value.as_array().unwrap().iter().map(|row| row["column"].as_str().unwrap().to_owned()).collect()
    }

    fn read(path: &Path) -> String {
        std::fs::read_to_string(path).unwrap()
    }

    #[test]
    fn a_file_has_the_rows_so_far_and_older_results_stay_until_there_are_new_ones() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out.json");
        std::fs::write(&path, "older").unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
        let mut json = JsonOutput::open(Some(&path)).unwrap();
        json.finish(&[]).unwrap();
        assert_eq!(read(&path), "older");
        json.update(&rows(&["a"]), &rows(&["b"])[0]);
        assert_eq!(columns(&read(&path)), ["a", "b"]);
        json.finish(&rows(&["a", "b", "c"])).unwrap();
        assert_eq!(columns(&read(&path)), ["a", "b", "c"]);
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o640);
        // Nothing of the temporary files is left.
        assert_eq!(folder.path().read_dir().unwrap().count(), 1);
    }

    #[test]
    fn a_link_stays_one_and_a_new_file_is_made() {
        let folder = tempfile::tempdir().unwrap();
        let (link, path) = (folder.path().join("link"), folder.path().join("out.json"));
        std::fs::write(&path, "older").unwrap();
        std::os::unix::fs::symlink("out.json", &link).unwrap();
        JsonOutput::open(Some(&link)).unwrap().finish(&rows(&["a"])).unwrap();
        assert!(link.is_symlink());
        assert_eq!(columns(&read(&path)), ["a"]);
        let new = folder.path().join("new.json");
        JsonOutput::open(Some(&new)).unwrap().finish(&rows(&["a"])).unwrap();
        assert_eq!(columns(&read(&new)), ["a"]);
    }

    #[test]
    fn a_write_that_fails_leaves_what_was_there() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out.json");
        std::fs::write(&path, "older").unwrap();
        let error = replace(&path, |file| {
            file.write_all(b"[half")?;
            Err(io::Error::from(io::ErrorKind::StorageFull))
        });
        assert_eq!(error.unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert_eq!((read(&path).as_str(), folder.path().read_dir().unwrap().count()), ("older", 1));
    }

    #[test]
    fn what_cannot_be_written_is_a_usage_error_before_anything_is_measured() {
        let folder = tempfile::tempdir().unwrap();
        for path in [folder.path().to_path_buf(), folder.path().join("none/out.json"), "/proc/none".into()] {
            let error = JsonOutput::open(Some(&path)).unwrap_err();
            let expected = format!("--json: found {} (", path.display());
            assert!(
                matches!(&error, BenchError::Usage(text) if text.starts_with(&expected) && text.contains("expected")),
                "{error}"
            );
        }
    }

    #[test]
    fn a_full_device_is_reported() {
        let mut json = JsonOutput::open(Some(Path::new("/dev/full"))).unwrap();
        json.update(&rows(&["a"]), &[]);
        let error = json.finish(&rows(&["a"])).unwrap_err().to_string();
        assert!(error.starts_with("--json /dev/full: No space left on device"), "{error}");
    }

    #[test]
    fn an_array_is_written_piece_by_piece() {
        let (mut out, mut written) = (vec![], 0);
        append(&mut out, &mut written, &rows(&["a"])).unwrap();
        append(&mut out, &mut written, &rows(&["a"])).unwrap();
        append(&mut out, &mut written, &rows(&["a", "b"])).unwrap();
        close(&mut out, written).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert_eq!(columns(&text), ["a", "b"]);
        assert!(text.starts_with("[\n  {\n    \""), "{text}");
        let mut out = vec![];
        close(&mut out, 0).unwrap();
        assert_eq!(out, b"[]\n");
    }
}
