# envkit/python: an image with Python and chosen packages, for programs that do not need envkit in their sandbox.
# `envkit image build python --with PACKAGE` makes the build context, which contains the packages as wheels.
ARG BASE
FROM ${BASE} AS install
ARG BUILD
LABEL envkit.stage=${BUILD}
COPY wheels /wheels
RUN mkdir /opt/packages
RUN python3 "$(echo /wheels/pip-*.whl)/pip" install --quiet --root-user-action ignore --no-cache-dir \
    --no-index --find-links /wheels --target /opt/packages --requirement /wheels/requirements.txt

FROM ${BASE}
COPY --from=install /opt/packages /opt/packages
ENV PYTHONPATH=/opt/packages PYTHONDONTWRITEBYTECODE=1
