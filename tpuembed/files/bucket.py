"""A bucket of S3, or of a store with its API, opened for writing: objects, conditional writes, uploads in parts.

It uses Amazon's own client, which finds credentials, region and endpoint as Amazon's tools do. The need for it beside
obstore: several machines upload the parts of one object. obstore has no such uploads.
Every failure raises an OSError with one line as its `strerror`.
"""

import base64
import contextlib
import errno
import hashlib
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from tpuembed.errors import MissingExtraError, one_line
from tpuembed.files.local import FileVersion
from tpuembed.files.store_errors import MissingBucketError, refusal, store_error

__all__ = ["Bucket", "content_md5", "md5"]

_TRIES: Final = 8
"""Tries of a request whose failure may be temporary: 500, 503, time-outs, broken connections."""
_CONNECT_SECONDS: Final = 10
_READ_SECONDS: Final = 300
"""Joining thousands of parts takes minutes."""
_CONNECTIONS: Final = 16
_SIGNED_SECONDS: Final = 6 * 3600
_MAX_PUT_BYTES: Final = 5 << 30
_TOKEN: Final = "tpuembed-write"
"""The metadata by which a writer knows an object as its own."""
_DENIED: Final = ("AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken")
_NO_CREDENTIALS: Final = "no credentials. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_SKIP_SIGNATURE=true"


class Bucket:
    """The bucket `name`. Any thread may use it.

    Raises:
        MissingBucketError: it does not exist.
        OSError: it cannot be reached, or not with these credentials.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._client = _client(None)
        from botocore.exceptions import ClientError

        with self._failing(""):
            try:
                answer = self._client.head_bucket(Bucket=name)
            except ClientError as error:
                answer = error.response
                if answer["ResponseMetadata"]["HTTPStatusCode"] not in (301, 400):
                    raise
            # The store reveals the region even if it refuses other requests.
            region = answer["ResponseMetadata"]["HTTPHeaders"].get("x-amz-bucket-region", "")
            if region and region != self._client.meta.region_name:
                self._client = _client(region)

    def create(self, key: str, data: bytes) -> str:
        """Write a new object and return its ETag. Raises FileExistsError if the object exists."""
        return self._put(key, data, md5(data).digest())

    def put(self, key: str, path: Path) -> None:
        """Write the bytes of a file as a new object. Raises FileExistsError if the object exists."""
        if path.stat().st_size > _MAX_PUT_BYTES:
            raise OSError(errno.EFBIG, f"{path.name} is larger than {_MAX_PUT_BYTES} bytes", self._url(key))
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, md5).digest()
            file.seek(0)
            self._put(key, file, digest)

    def _put(self, key: str, body: Any, digest: bytes) -> str:
        token = secrets.token_hex(16)
        own: dict[str, Any] = {"ContentMD5": content_md5(digest), "Metadata": {_TOKEN: token}}
        try:
            with self._failing(key):
                answer = self._client.put_object(Bucket=self.name, Key=key, Body=body, IfNoneMatch="*", **own)
                return str(answer["ETag"])
        except (FileExistsError, FileNotFoundError):
            # If an answer was lost, the client has retried, and met the object that it wrote. Others may have the same bytes.
            with contextlib.suppress(FileNotFoundError), self._failing(key):
                found = self._client.head_object(Bucket=self.name, Key=key)
                if found["Metadata"].get(_TOKEN) == token:
                    return str(found["ETag"])
            raise

    def head(self, key: str) -> FileVersion | None:
        """Return ETag and size of the object, or None if there is none."""
        with contextlib.suppress(FileNotFoundError), self._failing(key):
            answer = self._client.head_object(Bucket=self.name, Key=key)
            return FileVersion(int(answer["ContentLength"]), str(answer["ETag"]))
        return None

    def children(self, prefix: str) -> list[str]:
        """Return the names directly below `prefix`, of objects and of folders. `prefix` ends in a slash or is empty."""
        names = list[str]()
        with self._failing(prefix):
            for page in self._pages("list_objects_v2", Prefix=prefix, Delimiter="/"):
                names += [entry["Prefix"] for entry in page.get("CommonPrefixes", ())]
                names += [entry["Key"] for entry in page.get("Contents", ())]
        return [name.removeprefix(prefix).rstrip("/") for name in names if name != prefix]

    def keys(self, prefix: str) -> list[str]:
        """Return the keys of all objects that start with `prefix`."""
        with self._failing(prefix):
            pages = self._pages("list_objects_v2", Prefix=prefix)
            return [entry["Key"] for page in pages for entry in page.get("Contents", ())]

    def delete(self, keys: Sequence[str]) -> None:
        """Remove those of these objects that exist."""
        for key in keys:
            with self._failing(key):
                self._client.delete_object(Bucket=self.name, Key=key)

    def begin_upload(self, key: str) -> str:
        """Start the upload of an object in parts, which is visible once it is completed, and return its id."""
        with self._failing(key):
            return str(self._client.create_multipart_upload(Bucket=self.name, Key=key)["UploadId"])

    def sign_part(self, key: str, upload: str, number: int) -> str:
        """Return a URL that accepts a PUT of the part from anyone, for some hours."""
        asked = {"Bucket": self.name, "Key": key, "UploadId": upload, "PartNumber": number}
        with self._failing(key):
            return str(self._client.generate_presigned_url("upload_part", Params=asked, ExpiresIn=_SIGNED_SECONDS))

    def complete_upload(self, key: str, upload: str, tags: Sequence[str]) -> None:
        """Complete the new object from the parts with these ETags, in their order.

        Raises FileNotFoundError if the upload is gone, and FileExistsError if the object exists.
        """
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, start=1)]
        with self._failing(key):
            self._client.complete_multipart_upload(
                Bucket=self.name, Key=key, UploadId=upload, MultipartUpload={"Parts": parts}, IfNoneMatch="*"
            )

    def abort_upload(self, key: str, upload: str) -> None:
        """Abort an upload, if it exists, and remove its parts."""
        with contextlib.suppress(FileNotFoundError), self._failing(key):
            self._client.abort_multipart_upload(Bucket=self.name, Key=key, UploadId=upload)

    def _pages(self, operation: str, **request: str) -> Any:
        return self._client.get_paginator(operation).paginate(Bucket=self.name, **request)

    def _url(self, key: str) -> str:
        return f"s3://{self.name}/{key}".rstrip("/")

    @contextlib.contextmanager
    def _failing(self, key: str) -> Iterator[None]:
        """Turn the client's errors into OSErrors."""
        from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, PartialCredentialsError

        try:
            yield
        except ClientError as error:
            said, url = error.response.get("Error", {}), self._url(key)
            code, status = said.get("Code", ""), error.response["ResponseMetadata"]["HTTPStatusCode"]
            if code == "NoSuchBucket" or (status == 404 and not key):
                raise MissingBucketError(errno.ENOENT, f"the bucket {self.name!r} does not exist", url) from None
            line = refusal(status, code=code, message=said.get("Message", ""))
            raise store_error(403 if code in _DENIED else status, line, url) from None
        except (NoCredentialsError, PartialCredentialsError):
            raise PermissionError(errno.EACCES, _NO_CREDENTIALS, self._url(key)) from None
        except BotoCoreError as error:
            raise OSError(
                errno.EIO,
                f"{one_line(error).partition(': ')[2]}. Check the network and AWS_ENDPOINT_URL",
                self._url(key),
            ) from None


def md5(data: bytes = b"") -> Any:
    """Return the hash with which S3's API checks bodies, also on machines that forbid MD5 for security."""
    return hashlib.md5(data, usedforsecurity=False)


def content_md5(digest: bytes) -> str:
    """Return the value of the header Content-MD5 for a digest."""
    return base64.b64encode(digest).decode()


def _client(region: str | None) -> Any:
    try:
        import boto3
        from botocore import UNSIGNED
        from botocore.config import Config
    except ModuleNotFoundError as error:
        raise MissingExtraError("writing to s3://", str(error.name), "cloud") from None

    def is_set(variable: str) -> bool:
        return os.environ.get(variable, "").lower() in ("1", "true", "yes")

    # Stores other than Amazon's have buckets in the path.
    other = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    style = "path" if other and not is_set("AWS_VIRTUAL_HOSTED_STYLE_REQUEST") else "auto"
    config = Config(
        signature_version=UNSIGNED if is_set("AWS_SKIP_SIGNATURE") else "s3v4",
        retries={"mode": "standard", "max_attempts": _TRIES},
        connect_timeout=_CONNECT_SECONDS,
        read_timeout=_READ_SECONDS,
        max_pool_connections=_CONNECTIONS,
        # Bodies carry Content-MD5, which every store checks. A signed URL must not require a checksum that the worker
        # does not send.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"addressing_style": style},
    )
    named = region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    return boto3.session.Session().client("s3", region_name=named or "us-east-1", config=config)
